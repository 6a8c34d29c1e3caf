"""Real processes that talk over gloo, kept alive from one test to the next.

A case is a function at the top of a test file. It runs on every rank and returns what
the test checks, plain numbers and lists; `Pool.run` returns those of all ranks.
"""

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from helpers.limits import HANG, HANG_SECONDS

IMPORTED = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp"]
"""What one server imports, of which every rank is a fork: to import torch takes longer
than most cases. An import starts no thread and no process group."""


class Pool:
    """As many processes as there are ranks, in one process group."""

    def __init__(self, ranks, *, launched=False):
        """Start the processes.

        Args:
            ranks: How many.
            launched: Whether they have the variables that torchrun gives to processes,
                by which packages know what they are.
        """
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._ends, self.processes = [], []
        for rank in range(ranks):
            here, there = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(
                target=_work,
                args=(rank, ranks, store, there, sys.path, launched),
                daemon=True,
            )
            process.start()
            there.close()
            self._ends.append(here)
            self.processes.append(process)

    def run(self, case, *arguments, but=()):
        """Run a case on every rank; return the results in order, or raise.

        Args:
            case: A function at the top of a file.
            *arguments: What every rank is given.
            but: Ranks that will not answer.
        """
        place = case.__code__.co_filename, case.__name__, arguments
        for end in self._ends:
            end.send(place)
        answers = [
            None if rank in but else self._answer(rank)
            for rank in range(len(self._ends))
        ]
        broken = [
            f"rank {rank}:\n{answer[1]}"
            for rank, answer in enumerate(answers)
            if answer is not None and answer[0] == "raised"
        ]
        if broken:
            raise AssertionError("\n".join(broken))
        return [answer and answer[1] for answer in answers]

    def _answer(self, rank):
        end = self._ends[rank]
        # A rank that waits for another stops first, and says where.
        if not end.poll(2 * HANG_SECONDS):
            return "raised", "no answer"
        try:
            return end.recv()
        except EOFError:
            return "raised", "the process is gone"

    def close(self):
        for end in self._ends:
            with suppress(OSError):
                end.send(None)
        for process in self.processes:
            process.join(10)  # no test depends on it: what is left is killed
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def local(tensor):
    """Return the part of a tensor that this rank has: all of it, or a DTensor's."""
    return getattr(tensor, "_local_tensor", tensor)


def scaler_of_all(**settings):
    """Return a scaler that decides together with all ranks."""
    import torch

    from lossscale.torch import GradScaler

    world = torch.distributed.group.WORLD
    return GradScaler("cpu", init_scale=8.0, process_groups=world, **settings)


def break_gradient(parameters, rank=1):
    """Put an infinity into a gradient of one rank, behind the backs of the others."""
    import torch

    if torch.distributed.get_rank() != rank:
        return
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    next(part for part in gradients if part.numel()).view(-1)[0] = torch.inf


def _work(rank, ranks, store, end, path, launched):
    """Be one rank: run what is asked for until nothing is."""
    sys.path[:] = path
    if launched:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            # No process connects: the process group is there already.
            MASTER_ADDR="localhost",
            MASTER_PORT="1",
            OMP_NUM_THREADS="1",
            TORCHELASTIC_RUN_ID="tests",
        )
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=HANG,
    )
    files = {}
    while (place := end.recv()) is not None:
        file, name, arguments = place
        try:
            if file not in files:
                spec = importlib.util.spec_from_file_location(Path(file).stem, file)
                files[file] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(files[file])
            torch.manual_seed(0)
            end.send(("returned", getattr(files[file], name)(*arguments)))
        except BaseException:  # noqa: BLE001  # the test's process will raise it
            end.send(("raised", traceback.format_exc()))
    torch.distributed.destroy_process_group()
