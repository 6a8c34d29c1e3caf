# SPDX-License-Identifier: Apache-2.0
"""Run PyTorch's own tests with its GradScaler, or its optimizers, replaced by ours.

    python tools/torch_own_tests.py FOLDER                our GradScaler
    python tools/torch_own_tests.py FOLDER --optimizers   our AdamW, Adam and SGD
    python tools/torch_own_tests.py FOLDER --torchs-own   PyTorch's, to try the tests
    python tools/torch_own_tests.py FOLDER -k pickle -x   the rest goes to pytest

FOLDER is a checkout of PyTorch at the tag of the installed torch, or a folder with the
files of the table below in the same places: the wheel has no test/. They need the
packages expecttest and psutil.

Promised: every public name of the class, the deprecated ones too, leads to ours before
a test module is imported; the tests of the table run and no others; each gets a line of
its own. The exit status is 1 if one fails or if one of the table is not found, and 2 if
nothing could be run.

The optimizers are registered in `optim_db`, the table of PyTorch's optimizer tests, in
the place of torch's; its other optimizers are left out. With TRITON_INTERPRET=1 our
kernels update, in Triton's interpreter: it takes about 20 minutes without the tests of
many hundred steps (-k "not direction and not rosenbrock and not tensor_lr"). Not run
are PyTorch's tests of `differentiable=True`, which our classes refuse.

Not in the table of the scaler: tests that need FSDP or several processes, MPS or XPU,
and those of Inductor, which call an op and no scaler.
"""

import argparse
import importlib.util
import os
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ANY = "any device"
CUDA = "a CUDA device"
TWO = "two CUDA devices"


class Group(NamedTuple):
    """Tests of one class: the file, the class, what they need and their names."""

    file: str
    owner: str
    needs: str
    tests: tuple[str, ...]


LISTED = (
    Group(
        "test/test_torch.py",
        "TestTorchDeviceType",
        ANY,
        (
            "test_pickle_gradscaler",
            "test_grad_scaling_unscale",
            "test_grad_scaling_update_scale",
            "test_grad_scaling_unscale_sparse",
            "test_grad_scaling_state_dict",
            "test_grad_scaling_autocast",
            "test_params_invalidated_with_grads_invalidated_between_unscale_and_step",
            "test_params_invalidated_with_grads_invalidated_and_graph_partition",
            "test_grad_scale_will_not_overflow",
            "test_grad_scaling_clipping",
            "test_grad_scaling_clipping_separate_unscale",
            "test_grad_scaling_penalty",
            "test_grad_scaling_accumulation",
            "test_grad_scaling_multiple",
            "test_grad_scaler_pass_itself",
            "test_grad_scaler_deprecated_warning",
        ),
    ),
    Group(
        "test/test_cuda.py",
        "TestCudaOptims",
        CUDA,
        (
            "test_graph_scaling_fused_optimizers",
            "test_grad_scaling_autocast_fused_optimizers",
            "test_grad_scaler_with_preset_grad_scale",
            "test_graph_grad_scaling",
        ),
    ),
    Group(
        "test/test_optim.py",
        "TestOptimRenewed",
        CUDA,
        ("test_fused_does_not_step_if_foundinf",),
    ),
    Group(
        "test/test_cuda_multigpu.py",
        "TestCudaMultiGPU",
        TWO,
        (
            "test_grad_scaling_device_as_key",
            "test_grad_scaling_scale",
            "test_grad_scaling_multigpu",
        ),
    ),
    Group(
        "test/dynamo/test_repros.py",
        "ReproTests",
        ANY,
        ("test_amp_foreach_fake_impl",),
    ),
)

_EVERY_DEVICE = (
    "test_optim_infos_do_not_specify_global_cliquey_kwargs",
    "test_errors",
    "test_forloop_goes_right_direction",
    "test_param_group_with_lrscheduler_goes_right_direction",
    "test_tensor_lr",
    "test_rosenbrock_sparse",
    "test_complex",
    "test_complex_2d",
    "test_adamw_serialization",
    "test_foreach_matches_forloop",
    "test_fused_matches_forloop",
    "test_fused_error_on_params_on_meta",
    "test_param_groups_weight_decay",
    "test_param_groups_lr",
    "test_step_is_noop_when_params_have_no_grad",
    "test_step_is_noop_for_zero_grads",
    "test_grads_are_never_inplaced_into",
    "test_optimizer_can_be_printed",
    "test_state_dict_deterministic",
    "test_can_load_older_state_dict",
    "test_can_load_from_to_named_state_dict",
    "test_save_load_equality_with_weights_only",
    "test_load_nontensor_step",
    "test_state_dict_pre_hook",
    "test_state_dict_post_hook",
    "test_state_dict_pre_post_hook",
    "test_load_state_dict_pre_hook_and_prepend",
    "test_load_state_dict_post_hook",
    "test_load_state_dict_pre_post_hook",
    "test_step_post_hook",
    "test_step_pre_hook",
    "test_step_all_hooks",
    "test_deepcopy_copies_all_public_attrs",
    "test_non_empty_state",
    "test_step_iteration",
)
_CUDA_ONLY = (
    "test_set_default_dtype_works_with_foreach",
    "test_foreach_large_tensor",
    "test_peak_memory_foreach",
    "test_fused_large_tensor",
    "test_fused_does_not_step_if_foundinf",
    "test_cpu_load_state_dict",
    "test_state_dict_with_cuda_params",
    "test_fused_cpu_matches_cuda",
    "test_defaults_changed_to_foreach",
    "test_fused_mixed_precision_state_init",
    "test_fused_mixed_precision_hook_skips_existing_state",
    "test_fused_mixed_precision_numerics",
)
_TWO_DEVICES = ("test_forloop_goes_right_direction_multigpu", "test_mixed_device_dtype")
OF_OPTIMIZERS = tuple(
    Group("test/test_optim.py", "TestOptimRenewed", needs, tests)
    for needs, tests in ((ANY, _EVERY_DEVICE), (CUDA, _CUDA_ONLY), (TWO, _TWO_DEVICES))
)
OPTIMIZERS = ("Adam", "AdamW", "SGD")

DEPRECATED = (
    "`torch.{0}.amp.GradScaler(args...)` is deprecated. "
    "Please use `torch.amp.GradScaler('{0}', args...)` instead."
)


def without_device(ours: type, device: str) -> type:
    """Our class with the signature and the warning of a deprecated name."""

    class GradScaler(ours):
        """Takes no device."""

        def __init__(self, *settings, **named):
            warnings.warn(DEPRECATED.format(device), FutureWarning, stacklevel=2)
            super().__init__(device, *settings, **named)

    return GradScaler


def rebind(ours: type) -> None:
    """Lead every name of PyTorch's class, in every module of torch, to ours."""
    replaced = {
        torch.amp.GradScaler: ours,
        torch.cuda.amp.GradScaler: without_device(ours, "cuda"),
        torch.cpu.amp.GradScaler: without_device(ours, "cpu"),
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            was = vars(module).get("GradScaler")
            if isinstance(was, type) and was in replaced:
                module.GradScaler = replaced[was]
    places = torch, torch.amp, torch.amp.grad_scaler, torch.cuda.amp, torch.cpu.amp
    assert all(issubclass(place.GradScaler, ours) for place in places)


def needs_of(groups: tuple[Group, ...]) -> dict[tuple[str, str], str]:
    """Return what each test of a table needs, by class and name."""
    return {(g.owner, test): g.needs for g in groups for test in g.tests}


def register_optimizers(kind) -> None:
    """Leave `optim_db` three optimizers, those of a module.

    Args:
        kind: Has the classes: `lossscale.torch.optim` or `torch.optim`.
    """
    from torch.testing._internal import common_optimizers

    infos = [info for info in common_optimizers.optim_db if info.name in OPTIMIZERS]
    assert [info.name for info in infos] == list(OPTIMIZERS)
    for info in infos:
        info.optim_cls = getattr(kind, info.name)
        info.supported_impls = tuple(
            name for name in info.supported_impls if name != "differentiable"
        )
    common_optimizers.optim_db[:] = infos
    for place in (torch.optim, common_optimizers):
        for name in OPTIMIZERS:
            setattr(place, name, getattr(kind, name))


def listed(
    needs: dict[tuple[str, str], str], owner: str, name: str
) -> tuple[str, str] | None:
    """Class and name, in the table, of a test as it was collected.

    PyTorch makes a class for each kind of device, and appends the parameters, the
    device and the dtype to the name; of two names that fit, the longer is meant.
    """
    fits = [
        (in_table, test)
        for in_table, test in needs
        if re.fullmatch(f"{in_table}(CPU|CUDA)?", owner)
        and f"{name}_".startswith(f"{test}_")
    ]
    return max(fits, key=lambda fit: len(fit[1]), default=None)


class Recorder:
    """A pytest plugin: keeps the tests of the table alone, and what became of them."""

    def __init__(self, needs: dict[tuple[str, str], str]) -> None:
        self.needs = needs
        self.origin = {}  # what was collected: the test of the table it comes from
        self.outcomes = {}
        self.reasons = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        """Drop what is not in the table."""
        for item in items:
            origin = item.cls and listed(self.needs, item.cls.__name__, item.name)
            if origin:
                self.origin[item.nodeid] = origin
        items[:] = [item for item in items if item.nodeid in self.origin]

    def pytest_runtest_logreport(self, report):
        """Note the worst of set-up, call and tear-down."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        if report.outcome == "skipped":
            self.reasons[report.nodeid] = reason(report)
        elif report.outcome == "failed":
            self.reasons[report.nodeid] = last_line(report)


def reason(report) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return getattr(report, "wasxfail", "") or last_line(report)


def last_line(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message.splitlines()[0] if crash else ""


def tell(recorder: Recorder) -> bool:
    """Print a line for each test and the totals; whether none failed or is missing."""
    for nodeid, outcome in recorder.outcomes.items():
        why = recorder.reasons.get(nodeid)
        name = ".".join(nodeid.split("::")[1:])
        print(f"{outcome:9} {name}" + (f"  ({why})" if why else ""))
    missing = [test for test in recorder.needs if test not in recorder.origin.values()]
    for owner, test in missing:
        print(f"not found {owner}.{test}")
    tell_unused(recorder)
    counts = Counter(recorder.outcomes.values()) + Counter({"not found": len(missing)})
    print(", ".join(f"{number} {what}" for what, number in sorted(counts.items())))
    return not counts["failed"] and not missing


def tell_unused(recorder: Recorder) -> None:
    outcomes = {}
    for nodeid, outcome in recorder.outcomes.items():
        outcomes.setdefault(recorder.origin[nodeid], set()).add(outcome)
    for (owner, test), seen in outcomes.items():
        if seen == {"skipped"}:
            print(f"nowhere   {owner}.{test}  (needs {recorder.needs[owner, test]})")


def replace(*, optimizers: bool) -> None:
    """Put ours in the place of PyTorch's."""
    try:
        from lossscale.torch import GradScaler, optim
    except ImportError as error:
        stop(f"There is no lossscale.torch to try: {error}")
    if optimizers:
        register_optimizers(optim)
    else:
        rebind(GradScaler)


def stop(message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(2)


def check(folder: Path, files: list[str]) -> list[str]:
    """The test files that FOLDER has; ends the program if it has none."""
    if importlib.util.find_spec("expecttest") is None:
        stop("torch.testing._internal needs the package expecttest.")
    present = [file for file in files if (folder / file).is_file()]
    absent = [file for file in files if file not in present]
    tag = f"v{torch.__version__.partition('+')[0]}"
    if absent:
        print(
            f"{folder} lacks {', '.join(absent)}: take them from PyTorch's repository, "
            f"https://github.com/pytorch/pytorch, at the tag {tag}.",
            file=sys.stderr,
        )
    if not present:
        stop("Nothing to run.")
    return present


def run(folder: Path, groups: tuple[Group, ...], more: list[str]) -> int:
    files = check(folder, list(dict.fromkeys(group.file for group in groups)))
    # At the end: some folders of PyTorch's test/ are called like packages.
    sys.path.append(str(folder / "test"))
    recorder = Recorder(needs_of(groups))
    status = pytest.main(
        [
            *(str(folder / file) for file in files),
            f"--rootdir={folder}",
            f"--config-file={os.devnull}",  # neither this repository's nor PyTorch's
            "--noconftest",
            "--import-mode=importlib",
            "--continue-on-collection-errors",
            "--disable-warnings",
            "--quiet",
            "-pno:cacheprovider",
            *more,
        ],
        plugins=[recorder],
    )
    if status in {pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR}:
        return 2
    good = tell(recorder)
    if not recorder.outcomes:
        return 2
    return 0 if good and status == pytest.ExitCode.OK else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--torchs-own", action="store_true", help="leave PyTorch's class in its place"
    )
    parser.add_argument(
        "--optimizers", action="store_true", help="run the tests of the optimizers"
    )
    arguments, more = parser.parse_known_args()
    if not arguments.torchs_own:
        replace(optimizers=arguments.optimizers)
    elif arguments.optimizers:
        register_optimizers(torch.optim)
    groups = OF_OPTIMIZERS if arguments.optimizers else LISTED
    return run(arguments.folder.resolve(), groups, more)


if __name__ == "__main__":
    raise SystemExit(main())
