# SPDX-License-Identifier: Apache-2.0
"""Why a batch was not finite, on every backend of Keras.

explainer.py   explain: arguments, backends, and all variables kept
variables.py   the values of all variables, kept and put back
on_jax.py      the jaxpr of the loss and its gradients, equation by equation
on_torch.py    the explanation of the PyTorch adapter, with Keras's names
on_tensorflow.py  the batch run eagerly under a tape, operation by operation
layer_scopes.py   which layer an operation of TensorFlow is in, in both passes
operation_watch.py  what each operation of TensorFlow made of what
tensorflow_origins.py  what an operation did to make a number that is not finite

Each backend is imported by the function that needs it.
"""
