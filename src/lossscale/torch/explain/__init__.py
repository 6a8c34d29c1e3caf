# SPDX-License-Identifier: Apache-2.0
"""Why a batch was not finite: the batch is run again, and every operator is watched.

explainer.py     explain: the order of calls
stand_ins.py     what the scaler's methods do meanwhile
snapshot.py      what is saved, and put back
write_guard.py   copies a parameter when an operator writes to it
modules.py       names of modules and parameters; which module an operator is in
kinds.py         whether a tensor has NaN or infinities
watch.py         inspects what every operator reads and writes
trail.py         events, and which of them wrote what is at an address
losses.py        which of several losses an operator was part of
epsilons.py      numbers that were added and that their format rounds to 0
operators.py     what an operator's schema says of it
events.py        an operator that wrote something that was not finite
origins.py       what an operator did to make a number that is not finite
magnitudes.py    how large a result would have been
gradients.py     the gradients of parameters, in the order in which they arrive
description.py   from an event to a finding
ranks.py         what all ranks saw
collapse.py      watches the batch after the alarm

Nothing of it is imported before it is asked for.
"""
