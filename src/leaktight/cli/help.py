"""Help and errors of the command line, in words of its own: Typer and Click change theirs between versions."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from typer.core import TyperCommand, TyperGroup
from typer.models import ParameterInfo

from leaktight.core.errors import UsageError, suggestion

if TYPE_CHECKING:  # Typer has a Click of its own since 0.26
    from click import Command as AnyCommand
    from click import Context, HelpFormatter, Parameter

Rows: TypeAlias = list[tuple[str, str]]
EXAMPLE = "Example: "
_EXTRA = re.compile(r"Got unexpected extra argument.* \((.*)\)")


class Command(TyperCommand):
    """A command whose help and errors are the same with every version of Typer."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        write_help(self, ctx, formatter)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _explain(error, self, ctx)


class Group(TyperGroup):
    """A group of commands; as `Command`."""

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        write_help(self, ctx, formatter)

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _explain(error, self, ctx)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, AnyCommand | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise UsageError(f"there is no command {args[0]!r}; {suggestion(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


def _explain(error: Exception, command: AnyCommand, ctx: Context) -> NoReturn:
    """Raise an error of the parser as one of Leaktight's; any other as it is, also the one that asks for help."""
    if not hasattr(error, "format_message") or type(error).__name__ == "NoArgsIsHelpError":
        raise error
    text, name = str(error.format_message()), ctx.command_path.partition(" ")[2]
    option, param = getattr(error, "option_name", None), getattr(error, "param", None)
    more = f"see {ctx.command_path} --help"
    if type(error).__name__ == "NoSuchOption":
        known = [each for one in command.params for each in (*one.opts, *one.secondary_opts) if each[:1] == "-"]
        said = f"there is no option {option}; {suggestion(str(option), known)}"
    elif type(error).__name__ == "MissingParameter" and param is not None:
        said = f"expected {_label(command, param)}, got nothing; {more}"
    elif param is not None:
        reason = str(getattr(error, "message", "")).replace("Value error, ", "").rstrip(".")
        said = f"expected {_label(command, param)}, but {reason[:1].lower()}{reason[1:]}; {more}"
    elif extra := _EXTRA.match(text):
        said = f"expected fewer arguments, got also {extra[1]}; {more}"
    else:
        said = f"{text[:1].lower()}{text[1:].rstrip('.')}; {more}"
    raise UsageError(f"{name}: {said}" if name else said) from None


def write_help(command: AnyCommand, ctx: Context, formatter: HelpFormatter) -> None:
    """Usage, what the command does, its examples, arguments, options and commands."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.get_params(ctx) if each not in arguments]
    commands = command.commands if isinstance(command, TyperGroup) else {}
    called = ["[OPTIONS]", *(_label(command, each) for each in arguments), *(["COMMAND ..."] if commands else [])]
    formatter.write_usage(ctx.command_path, " ".join(called))
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    for paragraph in paragraphs:
        if not paragraph.startswith(EXAMPLE):
            formatter.write_paragraph()
            formatter.write_text(" ".join(paragraph.split()))
    examples = [paragraph.removeprefix(EXAMPLE) for paragraph in paragraphs if paragraph.startswith(EXAMPLE)]
    if examples:
        with formatter.section("Examples" if len(examples) > 1 else "Example"):
            for example in examples:  # never broken, so that it can be copied
                formatter.write(f"{'':{formatter.current_indent}}{example.strip()}\n")
    for title, rows in _sections(command, arguments, options):
        with formatter.section(title):
            formatter.write_dl(rows)


def _sections(command: AnyCommand, arguments: list[Parameter], options: list[Parameter]) -> Iterator[tuple[str, Rows]]:
    if arguments:
        yield "Arguments", [(_label(command, each), _meaning(command, each)) for each in arguments]
    yield "Options", [(_label(command, each), _meaning(command, each)) for each in options]
    if isinstance(command, TyperGroup):
        firsts = {name: inspect.cleandoc(each.help or "").split("\n\n")[0] for name, each in command.commands.items()}
        yield "Commands", [(name, " ".join(first.split())) for name, first in firsts.items()]


def _label(command: AnyCommand, param: Parameter) -> str:
    """How a parameter is written: `--out PATH`, `[CONFIG]`, `RUN...`."""
    info = _declared(command, param)
    named = (info.metavar if info else None) or _kind(command, param) or str(param.name).upper()
    if param.param_type_name == "argument":
        return named if param.required or named.startswith("[") else f"[{named}]"
    names = ", ".join([*sorted(param.opts, key=len), *param.secondary_opts])
    return names if getattr(param, "is_flag", False) else f"{names} {named}"


def _meaning(command: AnyCommand, param: Parameter) -> str:
    """The help of a parameter, with its default where the words do not have it."""
    info = _declared(command, param)
    words = str((info.help if info else None) or getattr(param, "help", None) or "")
    default = param.default
    if param.secondary_opts:
        default = param.opts[0] if default else param.secondary_opts[0]
    if param.required:
        return f"{words.rstrip('.')} (needed)."
    if info is None or "default:" in words or not isinstance(default, str | int | Path) or default is False:
        return words
    return f"{words.rstrip('.')} (default: {default})." if str(default) else words


def _hint(command: AnyCommand, param: Parameter) -> object:
    """The annotation of the parameter in the function that the command calls; None for Typer's own options."""
    if command.callback is None:
        return None
    return typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True).get(str(param.name))


def _declared(command: AnyCommand, param: Parameter) -> ParameterInfo | None:
    """What the function declares of the parameter; some versions of Click lose the help of arguments on the way."""
    marks = getattr(_hint(command, param), "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, ParameterInfo)), None)


def _kind(command: AnyCommand, param: Parameter) -> str:
    """The type of an option's value as a word."""
    declared = typing.get_args(_hint(command, param))
    types = [declared[0], *typing.get_args(declared[0])] if declared else []
    choices = next((typing.get_args(each) for each in types if typing.get_origin(each) is typing.Literal), ())
    if choices:
        return "|".join(map(str, choices))
    is_option = param.param_type_name == "option"
    return next((word for kind, word in ((Path, "PATH"), (int, "N"), (str, "TEXT")) if is_option and kind in types), "")
