"""The call rules: keywords and arguments that a function of the installed JAX does not accept.

A call is checked only if the function resolves to one JAX name whose signature lists everything it accepts. Codes:
``removed-keyword``, ``unknown-keyword``, ``deprecated-keyword``, ``too-many-arguments``, ``removed-option`` and
``unknown-option`` for ``jax.config.update``, ``removed-attribute`` for arrays, ``deprecated-mesh-context`` for ``with
mesh:``, and ``changed-behaviour``.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from dataclasses import dataclass

from capibara.migrate.findings import Findings
from capibara.migrate.history import Change, History
from capibara.migrate.installed import InstalledAPI
from capibara.migrate.names import is_jax
from capibara.migrate.scopes import Context, Meaning
from capibara.migrate.walker import Program

__all__ = ["CallRules"]

_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL_KINDS = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# Calls whose result is an array, for the few array attributes whose name alone says too little.
_ARRAY_MODULES = ("jax.numpy.", "jax.random.")
_ARRAY_CALLS = {"jax.device_put"}
_MESH_CALLS = {"jax.sharding.Mesh", "jax.make_mesh"}


@dataclass(slots=True)
class CallRules:
    """Checks calls of resolved JAX functions."""

    program: Program
    findings: Findings
    api: InstalledAPI
    history: History

    def check(self) -> None:
        for call, context in self.program.of_type(ast.Call):
            path, skip = self.target(call, context)
            if path is None:
                continue
            self._keywords(call, context, path)
            self._too_many(call, context, path, skip)
            self._notice(call, context, path, skip)
            if path == "jax.config.update":
                self._option(call, context)
        for node, context in self.program.of_type(ast.Attribute):
            self._array_attribute(node, context)
        for kind in (ast.With, ast.AsyncWith):
            for statement, context in self.program.of_type(kind):
                for item in statement.items:
                    self._mesh_context(item.context_expr, context)

    def target(self, call: ast.Call, context: Context) -> tuple[str | None, int]:
        """The JAX name that is called, and the number of leading arguments bound by functools.partial."""
        path, skip = self._single_path(call.func, context), 0
        if path == "functools.partial" and call.args:
            path, skip = self._single_path(call.args[0], context), 1
        if path is None or not is_jax(path) or not self.api.exists(path):
            return None, skip
        return path, skip

    def _single_path(self, node: ast.expr, context: Context) -> str | None:
        meanings = self.program.resolver.meanings(node, context)
        if len(meanings) > 1:
            # Of several bindings, those that exist here and may run; a fallback only if all else is gone.
            if not all(is_jax(meaning.path) for meaning in meanings):
                return None
            meanings = tuple(m for m in meanings if self.api.exists(m.path) and self._may_run(m))
            first = tuple(m for m in meanings if not any(g.kind == "try-handler" for g in m.guards))
            meanings = first or meanings
        return meanings[0].path if len(meanings) == 1 else None

    def _may_run(self, meaning: Meaning) -> bool:
        judge = self.findings.judge
        return all(judge.verdict(guard) != "not taken" for guard in meaning.guards if guard.kind == "branch")

    def _keywords(self, call: ast.Call, context: Context, path: str) -> None:
        signature = self.api.signature(path)
        accepted = {
            name
            for name, parameter in (signature.parameters.items() if signature else ())
            if parameter.kind in _KEYWORD_KINDS
        }
        for keyword in call.keywords:
            if keyword.arg is None:
                continue
            change = self.history.keywords.get((path, keyword.arg))
            name = f"{path}({keyword.arg}=)"
            gone = signature is not None and keyword.arg not in accepted
            if gone and change is not None:
                when = f" since JAX {change.removed}" if change.removed else ""
                message = f"{path} does not take {keyword.arg}={when}"
                self.findings.add(
                    keyword, context, "call", "error", "removed-keyword", name, message, change.fix
                )
            elif gone:
                assert signature is not None
                parameter = signature.parameters.get(keyword.arg)
                if parameter is not None:
                    message = f"{path} takes {keyword.arg} by position only"
                    fix = f"pass {keyword.arg} without its name"
                else:
                    message = f"{path} does not take {keyword.arg}="
                    near = difflib.get_close_matches(keyword.arg, accepted, n=1, cutoff=0.75)
                    fix = f"use {near[0]}=" if near else ""
                self.findings.add(keyword, context, "call", "error", "unknown-keyword", name, message, fix)
            elif change is not None and not _is_default(keyword.value, signature, keyword.arg):
                raises = change.effect == "raises" and change.removed_by(self.api.version)
                if raises:
                    message = f"{path} raises for {keyword.arg}= since JAX {change.removed}"
                else:
                    message = f"{keyword.arg}= of {path} is deprecated since JAX {change.deprecated}"
                severity = "error" if raises else "warning"
                passed_on = _parameter_default(keyword.value, context)
                if passed_on is not None and _is_default(passed_on, signature, keyword.arg):
                    severity, message = "info", f"{message}, unless it is left at its default"
                code = "removed-keyword" if raises else "deprecated-keyword"
                self.findings.add(keyword, context, "call", severity, code, name, message, change.fix)

    def _too_many(self, call: ast.Call, context: Context, path: str, skip: int) -> None:
        signature = self.api.signature(path)
        if signature is None or any(isinstance(argument, ast.Starred) for argument in call.args):
            return
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            return
        limit = sum(kind in _POSITIONAL_KINDS for kind in kinds)
        given = len(call.args) - skip
        if given > limit:
            extra = [
                name
                for name, parameter in signature.parameters.items()
                if parameter.kind is inspect.Parameter.KEYWORD_ONLY
            ]
            fix = (
                f"pass them by name ({', '.join(extra[:4])}{', …' if len(extra) > 4 else ''})"
                if extra
                else ""
            )
            message = (
                f"{path} takes at most {limit} positional argument{'s' * (limit != 1)}, {given} are given"
            )
            self.findings.add(call, context, "call", "error", "too-many-arguments", path, message, fix)

    def _notice(self, call: ast.Call, context: Context, path: str, skip: int) -> None:
        known = self.history.notices.get(path)
        if known is None or not known.unless_keyword:
            return
        names = {keyword.arg for keyword in call.keywords}
        if known.unless_keyword in names or None in names or len(call.args) - skip >= known.unless_positional:
            return
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            return
        message = f"{path} {known.message}"
        self.findings.add(call, context, "notice", "info", "changed-behaviour", path, message, known.fix)

    def _option(self, call: ast.Call, context: Context) -> None:
        if not call.args or not isinstance(call.args[0], ast.Constant):
            return
        option = call.args[0].value
        if not isinstance(option, str) or option in self.api.config_options():
            return
        change = self.history.options.get(option)
        if change is not None:
            message = f"config option {option!r} was removed in JAX {change.removed}"
            self.findings.add(
                call, context, "attribute", "error", "removed-option", option, message, change.fix
            )
        elif option.startswith("jax_"):
            # Options of other packages, or of JAX modules that are not imported yet, have other prefixes.
            near = difflib.get_close_matches(option, self.api.config_options(), n=1, cutoff=0.8)
            fix = f"use {near[0]!r}" if near else ""
            message = f"JAX {self.api.versions['jax']} has no config option {option!r}"
            self.findings.add(call, context, "attribute", "error", "unknown-option", option, message, fix)

    def _array_attribute(self, node: ast.Attribute, context: Context) -> None:
        part: ast.expr = node
        while isinstance(part, ast.Attribute):
            change = self.history.attributes.get(part.attr)
            if change is not None and self._is_array_attribute(part, context, change):
                message = f"arrays have no {part.attr!r} since JAX {change.removed}"
                severity = "error" if self._is_array(part.value, context) else "warning"
                name = f"jax.Array.{part.attr}"
                self.findings.add(
                    part, context, "attribute", severity, "removed-attribute", name, message, change.fix
                )
            part = part.value

    def _is_array_attribute(self, node: ast.Attribute, context: Context, change: Change) -> bool:
        if not isinstance(node.ctx, ast.Load) or self.program.resolver.paths(node, context):
            return False  # stored to, or a name in a module
        known = change.distinctive or self._is_array(node.value, context)
        return known and not hasattr(self.api.lookup("jax.Array").value, node.attr)

    def _is_array(self, node: ast.expr, context: Context) -> bool:
        """Whether a value visibly comes from a JAX call, or from a name assigned once, from such a call."""
        call = self.program.value_of(node, context)
        if not isinstance(call, ast.Call):
            return False
        paths = self.program.resolver.paths(call.func, context)
        return bool(paths) and all(path.startswith(_ARRAY_MODULES) or path in _ARRAY_CALLS for path in paths)

    def _mesh_context(self, node: ast.expr, context: Context) -> None:
        if self.api.version < (0, 10, 1):  # the first release that warns
            return
        call = self.program.value_of(node, context)
        if isinstance(call, ast.Call) and set(self.program.resolver.paths(call.func, context)) & _MESH_CALLS:
            self.findings.add(
                node,
                context,
                "notice",
                "warning",
                "deprecated-mesh-context",
                "jax.sharding.Mesh",
                "`with mesh:` is deprecated since JAX 0.10.1",
                "use `with jax.set_mesh(mesh):`",
            )


def _parameter_default(value: ast.expr, context: Context) -> ast.expr | None:
    """The default of a parameter of the surrounding function, when ``value`` passes that parameter on."""
    if not isinstance(value, ast.Name):
        return None
    for function in context.functions:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [
            *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            if argument.arg == value.id:
                return default
    return None


def _is_default(value: ast.expr, signature: inspect.Signature | None, name: str) -> bool:
    """Whether a literal argument equals the parameter's default, so that passing it changes nothing."""
    if signature is None or not isinstance(value, (ast.Constant, ast.Tuple)):
        return False
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return False
    default = signature.parameters[name].default
    return type(literal) is type(default) and literal == default
