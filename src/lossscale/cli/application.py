# SPDX-License-Identifier: Apache-2.0
"""The group of subcommands, and how errors are printed."""

import os
import sys
from typing import Any

import click

from lossscale.cli import what_is_missing
from lossscale.cli.backtest import backtest
from lossscale.cli.choices import Group
from lossscale.cli.convert import convert
from lossscale.cli.demo import demo
from lossscale.cli.doctor import doctor
from lossscale.cli.explain import explain
from lossscale.cli.export import export
from lossscale.cli.presets import presets
from lossscale.cli.recommend import recommend
from lossscale.cli.report import report
from lossscale.cli.simulate import simulate
from lossscale.cli.watch import watch
from lossscale.errors import LossScaleError


class _Group(Group):
    """Turns our exceptions into one line on stderr and exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LossScaleError as error:
            raise click.UsageError(str(error)) from None
        except ModuleNotFoundError as error:
            raise click.UsageError(what_is_missing(error)) from None
        except MemoryError:
            message = "That needs more memory than there is."
            raise click.UsageError(message) from None
        except BrokenPipeError:
            # The reader of a pipe went away, as `head` does: nothing is wrong. Keep
            # the interpreter from flushing into the closed pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return None
        except (OSError, UnicodeError) as error:
            raise click.UsageError(str(error)) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lossscale")
def application() -> None:
    """Loss scaling for mixed-precision training: examine, try and convert."""


for command in (
    *(demo, report, explain, watch, export),
    *(backtest, recommend, simulate),
    *(presets, convert, doctor),
):
    application.add_command(command)
