# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of layers that stay in float32; imported late.

norms.py   layer normalisation and RMS normalisation, forward and backward
launch.py  how rows are divided among programs; launches
"""
