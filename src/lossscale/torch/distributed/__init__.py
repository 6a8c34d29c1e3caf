# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: which of them decide together, and how.

rank_groups.py      the process groups that a scaler was given
reduction_plan.py   the groups of one optimizer, and over which its gradients are
sharded consensus.py        one all-reduce, one decision; scales that differ are an
error dtensor.py          the shard of a DTensor that this rank has
"""
