# SPDX-License-Identifier: Apache-2.0
"""The sentences of an explanation. Nothing is said that the data does not show."""

import math

from lossscale.core.explanation.findings import Explanation, Finding
from lossscale.core.explanation.numbers import format_number
from lossscale.core.explanation.origins import GIVEN, WORDS

_ROLES = {
    "batch": "a tensor of the batch",
    "parameter": "a parameter",
    "buffer": "a buffer",
    "constant": "a constant",
    "input": "an input",
    "output": "the output",
    "intermediate": "an intermediate result",
    "loss": "the loss",
    "parameter gradient": "the gradient of a parameter",
    "input gradient": "the gradient with respect to the input",
    "output gradient": "the gradient with respect to the output",
    "intermediate gradient": "the gradient of an intermediate result",
}


def describe(seen: Explanation) -> str:
    """Return an explanation in sentences, with the other ranks' after it."""
    own = " ".join(_sentences(seen))
    if seen.rank is None:
        return own
    parts = {part.rank or 0: " ".join(_sentences(part)) for part in seen.others}
    parts[seen.rank] = own
    return "\n".join(f"Rank {rank}: {parts[rank]}" for rank in sorted(parts))


def describe_finding(found: Finding) -> str:
    """Return a finding as a part of a sentence."""
    kind = "NaN" if found.is_nan else "infinite"
    text = f"{_describe_tensor(found)}{_describe_pass(found)} is {kind}"
    if found.origin in GIVEN:
        return (
            f"{text}; it {WORDS[found.origin]}{_describe_change(found)}"
            f"{_describe_micro_batch(found)}"
        )
    if found.role == "constant":
        return f"{text}{_describe_line(found)}{_describe_micro_batch(found)}"
    operation = found.operation or "an operation"
    if found.node is not None and found.direction == "backward":
        operation = f"{operation} (of {found.node})"
    return (
        f"{text}: {operation} {WORDS[found.origin]}{_describe_size(found)}"
        f"{_describe_line(found)}{_describe_micro_batch(found)}"
    )


def advise(seen: Explanation) -> str:
    """Return what to try, as far as it follows from what was seen."""
    found = seen.first or seen.first_nan
    if seen.finite or found is None:
        return ""
    is_given = found.origin in GIVEN and found.origin != "another rank"
    if seen.helping_scale is not None and not is_given:
        return f"Lower the scale to {format_number(seen.helping_scale)} or below."
    if seen.is_backward_overflow:
        return _advise_on_gradients(seen)
    return _advise_against(found)


def _advise_on_gradients(seen: Explanation) -> str:
    """Return what helps against a gradient that overflows."""
    if not seen.trials:
        return "The scale is probably too high."
    return (
        "The gradients do not fit at any scale that was tried: make the loss smaller "
        "(a mean in place of a sum), or compute what they pass through in float32 or "
        "bfloat16."
    )


def _advise_against(found: Finding) -> str:
    """Return what helps against a cause that is not the scale."""
    if found.origin in ("overflow", "inf - inf") and found.dtype == "float16":
        what = "weights" if found.role == "parameter" else "inputs"
        return (
            f"Compute {_name_place(found)} in float32 or bfloat16, or make its {what} "
            "smaller."
        )
    if found.lost_epsilon is not None:
        return _advise_on_epsilon(found, found.lost_epsilon)
    if found.origin in _DIVISIONS:
        return _advise_on_division(found)
    return _ADVICE.get(found.origin, "")


def _advise_on_epsilon(found: Finding, epsilon: float) -> str:
    """Return what helps if what was added against this is 0 in the format."""
    number = f"{epsilon:g}".replace("e-0", "e-") if epsilon else "number"
    smallest = _SMALLEST.get(found.dtype or "", "larger")
    return (
        f"The {number} that is added against this is 0 in {found.dtype}, whose "
        f"smallest number is {smallest}: add a larger one, or compute this in float32."
    )


def _advise_on_division(found: Finding) -> str:
    """Return what helps against a division by 0."""
    operation = found.operation or ""
    if operation.startswith("nll_loss"):
        return (
            "Every target of the batch is ignored: skip such a batch, or divide a sum "
            "by max(count, 1) in place of the mean."
        )
    names = f"{operation} {found.module_type or ''}".lower()
    if found.direction == "forward" and _is_norm(names):
        return "Set the norm's eps above 0."
    if found.node is not None and found.node.startswith("Sqrt"):
        return (
            "The derivative of a root at 0 is infinite: add a small number under the "
            "root."
        )
    return "Add a small number to the divisor, or clamp it."


def _is_norm(names: str) -> bool:
    """Whether an operation or a layer is a norm, by their names."""
    return any(name in names for name in ("norm", "normalization"))


_DIVISIONS = ("division by zero", "0 / 0")

_SMALLEST = {"float16": "6e-8", "bfloat16": "9e-41", "float32": "1.4e-45"}
"""The smallest positive number of a format, subnormal ones included."""


_ADVICE = {
    "batch": "Clean the data: drop or repair samples that are not finite.",
    "parameter": (
        "The weights are damaged: go back to a checkpoint in which they are finite."
    ),
    "buffer": (
        "The buffer is damaged: go back to a checkpoint in which it is finite, or "
        "reset it."
    ),
    "constant": "Use a finite number in place of the constant.",
    "log of 0": "Clamp the argument to a small positive number, or use log_softmax.",
    "log of a negative number": "Clamp the argument to a small positive number.",
    "root of a negative number": "Clamp the argument to 0 or above.",
    "negative base": "Clamp the base to 0 or above, or use a whole exponent.",
    "outside the domain": "Clamp the argument to the function's domain.",
    "too few values": (
        "Give the statistic more values, or leave out what has too few of them."
    ),
    "row of -inf": (
        "Leave at least one position of every row unmasked, or set the rows that are "
        "masked entirely to 0 afterwards."
    ),
}


def _sentences(seen: Explanation) -> list[str]:
    """Return what is said of one rank."""
    if seen.finite and seen.first is None:
        text = (
            f"At a scale of {format_number(seen.scale)} the loss and all gradients "
            "were finite: there is nothing to explain."
        )
        return [text, *seen.notes]
    sentences = [_describe_loss(seen)]
    if seen.first is not None:
        sentences.append(f"First, {seen.first}.")
    if seen.first_nan is not None and seen.first_nan != seen.first:
        sentences.append(f"Then, {seen.first_nan}.")
    sentences += _describe_bracket(seen)
    sentences += _describe_trials(seen)
    if seen.advice:
        sentences.append(seen.advice)
    return [*sentences, *seen.notes]


def _describe_loss(seen: Explanation) -> str:
    """Return what became of the loss."""
    start = f"At a scale of {format_number(seen.scale)}"
    if seen.loss_finite is None:
        return f"{start} a gradient was not finite."
    if seen.loss_finite:
        return f"{start} the loss was finite and a gradient was not."
    return f"{start} the loss was not finite before it was scaled."


def _describe_tensor(found: Finding) -> str:
    """Return what a tensor is, and of which module."""
    text = _ROLES[found.role]
    if found.role == "parameter gradient" and found.tensor:
        kind = f" ({found.module_type})" if found.module_type else ""
        return f"the gradient of {found.tensor}{kind}"
    if found.role in ("parameter", "buffer") and found.tensor:
        text = f"the {found.role} {found.tensor}"
    elif found.tensor:
        text = f"{text} ({found.tensor})"
    if found.role in ("batch", "constant") and found.module is not None:
        return f"{text}, which {_name_place(found)} read first,"
    if found.role in ("batch", "constant", "loss", "parameter", "buffer"):
        return text
    if found.role == "input gradient" and found.module is None:
        return f"the gradient that {_name_place(found)} passes to the model"
    return f"{text} of {_name_place(found)}"


def _name_place(found: Finding) -> str:
    """Return the name of a module and its class."""
    kind = found.module_type
    if found.module is None and not found.has_model:
        return f"the code at {found.line}" if found.line else "the function"
    if found.module is None:
        return f"{kind}, outside the model" if kind else "code outside the model"
    if not found.module:
        return f"the model itself ({kind})" if kind else "the model itself"
    return f"{found.module} ({kind})" if kind else found.module


def _describe_pass(found: Finding) -> str:
    return "" if found.direction == "given" else f" in the {found.direction} pass"


def _describe_size(found: Finding) -> str:
    """Return how large the result would be, if that is known."""
    if found.magnitude is None:
        return f" ({found.dtype})" if found.dtype else ""
    if not math.isfinite(found.magnitude):
        return f" and of float64 ({found.dtype})"
    text = f": {format_number(found.magnitude)}"
    if found.ratio is None or found.largest is None:
        return text
    if found.ratio < _CLOSE:
        largest = format_number(found.largest)
        return f"{text}, just above the largest {found.dtype} number, {largest}"
    ratio = f"{found.ratio:.1f}" if found.ratio < _ROUND else f"{found.ratio:.3g}"
    return f"{text}, {ratio} times the largest {found.dtype} number"


_CLOSE = 1.05
"""Ratios below it would be written as 1.0."""

_ROUND = 100.0
"""Ratios below it are written with one digit after the point."""


def _describe_line(found: Finding) -> str:
    """Return the line of the code, unless the location is named by it."""
    is_named = found.module is None and not found.has_model
    if found.line is None or (is_named and found.role not in _UNPLACED):
        return ""
    return f" ({found.line})"


_UNPLACED = ("batch", "constant", "loss", "parameter", "buffer", "parameter gradient")
"""Tensors that are described without where they were made."""


def _describe_change(found: Finding) -> str:
    """Return by which operation a gradient was changed, if that is known."""
    if found.origin != "changed afterwards" or found.operation is None:
        return ""
    where = f", {found.line}" if found.line else ""
    return f" ({found.operation}{where})"


def _describe_micro_batch(found: Finding) -> str:
    if found.micro_batch is not None:
        return f", in micro-batch {found.micro_batch} (counted from 0)"
    if found.loss is not None:
        return f", for loss {found.loss} (counted from 0)"
    return ""


def _describe_bracket(seen: Explanation) -> list[str]:
    """Return between which parameters the gradients stopped being finite."""
    first, last = seen.first_nonfinite_gradient, seen.last_finite_gradient
    if first is None:
        return []
    if last is None:
        return [f"The gradient of {first} came first, and was not finite."]
    text = (
        f"In the order of the backward pass, the gradient of {last} was the last that "
        f"was finite, and that of {first} the first that was not."
    )
    return [text]


def _describe_trials(seen: Explanation) -> list[str]:
    """Return whether a lower scale helps."""
    if seen.finite:
        return []
    if not seen.may_depend_on_scale:
        return ["No scale helps: the loss is not finite even unscaled."]
    if not seen.trials:
        return []
    failed = [format_number(one.scale) for one in seen.trials if not one.finite]
    tried = "; ".join(failed)
    if seen.helping_scale is None:
        return [f"Lower scales did not help: {tried} were tried."]
    helping = format_number(seen.helping_scale)
    except_at = f", and not at {tried}" if tried else ""
    text = (
        f"The same batch gave finite gradients at a scale of {helping}{except_at}: a "
        "lower scale helps."
    )
    return [text]
