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


def describe(explanation: Explanation) -> str:
    """Return an explanation in sentences, with the other ranks' after it."""
    text = " ".join(_sentences(explanation))
    if explanation.rank is None:
        return text
    texts = {
        of_rank.rank or 0: " ".join(_sentences(of_rank))
        for of_rank in explanation.others
    }
    texts[explanation.rank] = text
    return "\n".join(f"Rank {rank}: {texts[rank]}" for rank in sorted(texts))


def describe_finding(finding: Finding) -> str:
    """Return a finding as a part of a sentence."""
    kind = "NaN" if finding.is_nan else "infinite"
    text = f"{_describe_tensor(finding)}{_describe_pass(finding)} is {kind}"
    if finding.origin in GIVEN:
        return f"{text}; it {WORDS[finding.origin]}{_describe_micro_batch(finding)}"
    operation = finding.operation or "an operation"
    if finding.node is not None and finding.direction == "backward":
        operation = f"{operation} (of {finding.node})"
    return (
        f"{text}: {operation} {WORDS[finding.origin]}{_describe_size(finding)}"
        f"{_describe_line(finding)}{_describe_micro_batch(finding)}"
    )


def advise(explanation: Explanation) -> str:
    """Return what to try, as far as it follows from what was seen."""
    finding = explanation.first or explanation.first_nan
    if explanation.finite or finding is None:
        return ""
    if finding.origin not in GIVEN and explanation.lower_scale_helps:
        return f"Lower the scale to {explanation.helping_scale:g} or below."
    return _advise_against(finding)


def _advise_against(finding: Finding) -> str:
    """Return what helps against a cause that is not the scale."""
    if finding.origin == "overflow" and finding.dtype == "float16":
        what = "weights" if finding.role == "parameter" else "inputs"
        return (
            f"Compute {_name_location(finding)} in float32 or bfloat16, or make its "
            f"{what} smaller."
        )
    if finding.node is not None and finding.node.startswith("Sqrt"):
        return (
            "The derivative of a root at 0 is infinite: add a small number under the "
            "root."
        )
    return _ADVICE.get(finding.origin, "")


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


def _sentences(explanation: Explanation) -> list[str]:
    """Return what is said of one rank."""
    if explanation.finite and explanation.first is None:
        text = (
            f"At a scale of {explanation.scale:g} the loss and all gradients were "
            "finite: there is nothing to explain."
        )
        return [text, *explanation.notes]
    sentences = [_describe_loss(explanation)]
    if explanation.first is not None:
        sentences.append(f"First, {explanation.first}.")
    if explanation.first_nan is not None and explanation.first_nan != explanation.first:
        sentences.append(f"Then, {explanation.first_nan}.")
    sentences += _describe_bracket(explanation)
    sentences += _describe_trials(explanation)
    if explanation.advice:
        sentences.append(explanation.advice)
    return [*sentences, *explanation.notes]


def _describe_loss(explanation: Explanation) -> str:
    """Return what became of the loss."""
    start = f"At a scale of {explanation.scale:g}"
    if explanation.loss_finite is None:
        return f"{start} a gradient was not finite."
    if explanation.loss_finite:
        return f"{start} the loss was finite and a gradient was not."
    return f"{start} the loss was not finite before it was scaled."


def _describe_tensor(finding: Finding) -> str:
    """Return what a tensor is, and of which module."""
    text = _ROLES[finding.role]
    if finding.role == "parameter gradient" and finding.tensor:
        kind = f" ({finding.module_type})" if finding.module_type else ""
        return f"the gradient of {finding.tensor}{kind}"
    if finding.role in ("parameter", "buffer") and finding.tensor:
        text = f"the {finding.role} {finding.tensor}"
    elif finding.tensor:
        text = f"{text} ({finding.tensor})"
    if finding.role == "batch" and finding.module is not None:
        return f"{text}, which {_name_location(finding)} read first,"
    if finding.role in ("batch", "loss", "parameter", "buffer"):
        return text
    if finding.role == "input gradient" and finding.module is None:
        return f"the gradient that {_name_location(finding)} passes to the model"
    return f"{text} of {_name_location(finding)}"


def _name_location(finding: Finding) -> str:
    """Return the name of a module and its class."""
    kind = finding.module_type
    if finding.module is None:
        return f"{kind}, outside the model" if kind else "code outside the model"
    if not finding.module:
        return f"the model itself ({kind})" if kind else "the model itself"
    return f"{finding.module} ({kind})" if kind else finding.module


def _describe_pass(finding: Finding) -> str:
    return "" if finding.direction == "given" else f" in the {finding.direction} pass"


def _describe_size(finding: Finding) -> str:
    """Return how large the result would be, if that is known."""
    if finding.magnitude is None:
        return f" ({finding.dtype})" if finding.dtype else ""
    text = f": {finding.magnitude:.4g}"
    if finding.ratio is None:
        return text
    ratio = f"{finding.ratio:.1f}" if finding.ratio < _ROUND else f"{finding.ratio:.3g}"
    return f"{text}, {ratio} times the largest {finding.dtype} number"


_ROUND = 100.0
"""Ratios below it are written with one digit after the point."""


def _describe_line(finding: Finding) -> str:
    return "" if finding.line is None else f" ({finding.line})"


def _describe_micro_batch(finding: Finding) -> str:
    if finding.micro_batch is None:
        return ""
    return f", in micro-batch {finding.micro_batch} (counted from 0)"


def _describe_bracket(explanation: Explanation) -> list[str]:
    """Return between which parameters the gradients stopped being finite."""
    first, last = explanation.first_nonfinite_gradient, explanation.last_finite_gradient
    if first is None:
        return []
    if last is None:
        return [f"The gradient of {first} came first, and was not finite."]
    text = (
        f"In the order of the backward pass, the gradient of {last} was the last that "
        f"was finite, and that of {first} the first that was not."
    )
    return [text]


def _describe_trials(explanation: Explanation) -> list[str]:
    """Return whether a lower scale helps."""
    if explanation.finite:
        return []
    if explanation.loss_finite is False:
        return ["No scale can help, because the loss is not finite without one."]
    if not explanation.trials:
        return []
    tried = ", ".join(
        f"{trial.scale:g}" for trial in explanation.trials if not trial.finite
    )
    if explanation.helping_scale is None:
        return [f"Lower scales did not help: {tried} were tried."]
    failed = f", and not at {tried}" if tried else ""
    text = (
        "The same batch gave finite gradients at a scale of "
        f"{explanation.helping_scale:g}{failed}: a lower scale helps."
    )
    return [text]
