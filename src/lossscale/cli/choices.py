# SPDX-License-Identifier: Apache-2.0
"""Click helpers: suggestions for misspelt names, options that exclude each other."""

from typing import Any

import click

from lossscale.core.validation import did_you_mean


class Choice(click.Choice):  # type: ignore[type-arg]  # generic since click 8.2
    """One of several words."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the word, or fail with the nearest one."""
        if value not in self.choices:
            message = (
                f"{value!r} is not one of {', '.join(self.choices)}."
                f"{did_you_mean(str(value), self.choices)}"
            )
            self.fail(message, param, ctx)
        return value


class Group(click.Group):
    """Commands, found by name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names, or fail with the nearest.

        Older versions of click make no suggestion.
        """
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            ctx.fail(
                f"There is no command {name!r}; there are {', '.join(self.commands)}."
                f"{did_you_mean(name, self.commands)}"
            )
        return super().resolve_command(ctx, args)


def was_typed(ctx: click.Context, name: str) -> bool:
    """Whether an option was typed, whatever its value; by the parameter's name."""
    return ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def refuse_together(ctx: click.Context, *names: str) -> None:
    """Fail if both of these options were typed; names are those of the parameters."""
    if not all(was_typed(ctx, name) for name in names):
        return
    options = {
        parameter.name: parameter.opts[0] for parameter in ctx.command.get_params(ctx)
    }
    first, second = (options[name] for name in names)
    ctx.fail(f"{first} and {second} exclude each other; give one of them.")
