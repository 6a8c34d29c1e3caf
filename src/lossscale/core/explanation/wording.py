# SPDX-License-Identifier: Apache-2.0
"""The sentences of an explanation. Nothing is said that the data does not show."""

from lossscale.core.explanation.findings import Explanation, Finding
from lossscale.core.explanation.origins import GIVEN, WORDS

_ROLES = {
    "batch": "a tensor of the batch",
    "parameter": "a parameter",
    "buffer": "a buffer",
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
    texts = {
        explanation.rank or 0: " ".join(_sentences(explanation))
        for explanation in seen.others
    }
    texts[seen.rank] = own
    return "\n".join(f"Rank {rank}: {texts[rank]}" for rank in sorted(texts))


def describe_finding(found: Finding) -> str:
    """Return a finding as a part of a sentence."""
    kind = "NaN" if found.is_nan else "infinite"
    text = f"{_describe_tensor(found)}{_describe_pass(found)} is {kind}"
    if found.origin in GIVEN:
        return f"{text}; it {WORDS[found.origin]}{_describe_micro_batch(found)}"
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
    if found.origin not in GIVEN and seen.lower_scale_helps:
        return f"Lower the scale to {seen.helping_scale:g} or below."
    return _advise_against(found)


def _advise_against(found: Finding) -> str:
    """Return what helps against a cause that is not the scale."""
    if found.origin == "overflow" and found.dtype == "float16":
        what = "weights" if found.role == "parameter" else "inputs"
        return (
            f"Compute {_name_location(found)} in float32 or bfloat16, or make its "
            f"{what} smaller."
        )
    if found.node is not None and found.node.startswith("Sqrt"):
        return (
            "The derivative of a root at 0 is infinite: add a small number under the "
            "root."
        )
    return _ADVICE.get(found.origin, "")


_ADVICE = {
    "batch": "Clean the data: drop or repair samples that are not finite.",
    "parameter": (
        "The weights are damaged: go back to a checkpoint in which they are finite."
    ),
    "buffer": (
        "The buffer is damaged: go back to a checkpoint in which it is finite, or "
        "reset it."
    ),
    "division by zero": "Add a small number to the divisor, or clamp it.",
    "0 / 0": "Add a small number to the divisor, or clamp it.",
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
            f"At a scale of {seen.scale:g} the loss and all gradients were finite: "
            "there is nothing to explain."
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
    start = f"At a scale of {seen.scale:g}"
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
    if found.role == "batch" and found.module is not None:
        return f"{text}, which {_name_location(found)} read first,"
    if found.role in ("batch", "loss", "parameter", "buffer"):
        return text
    if found.role == "input gradient" and found.module is None:
        return f"the gradient that {_name_location(found)} passes to the model"
    return f"{text} of {_name_location(found)}"


def _name_location(found: Finding) -> str:
    """Return the name of a module and its class."""
    kind = found.module_type
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
    text = f": {found.magnitude:.4g}"
    if found.ratio is None:
        return text
    ratio = f"{found.ratio:.1f}" if found.ratio < _ROUND else f"{found.ratio:.3g}"
    return f"{text}, {ratio} times the largest {found.dtype} number"


_ROUND = 100.0
"""Ratios below it are written with one digit after the point."""


def _describe_line(found: Finding) -> str:
    return "" if found.line is None else f" ({found.line})"


def _describe_micro_batch(found: Finding) -> str:
    if found.micro_batch is None:
        return ""
    return f", in micro-batch {found.micro_batch} (counted from 0)"


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
    if seen.loss_finite is False:
        return ["No scale can help, because the loss is not finite without one."]
    if not seen.trials:
        return []
    tried = ", ".join(f"{trial.scale:g}" for trial in seen.trials if not trial.finite)
    if seen.helping_scale is None:
        return [f"Lower scales did not help: {tried} were tried."]
    failed = f", and not at {tried}" if tried else ""
    text = (
        f"The same batch gave finite gradients at a scale of {seen.helping_scale:g}"
        f"{failed}: a lower scale helps."
    )
    return [text]
