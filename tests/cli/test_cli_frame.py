"""The frame of the command line: verbs, codes, errors, and that help costs nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import python

import capibara.cli
from capibara.cli import VERBS, main
from capibara.cli._json import print_json
from capibara.cli._signals import Terminated, raise_on_sigterm
from capibara.errors import ConfigError
from capibara.train.errors import CheckpointWriteError, ProcessesError, RunLockedError


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A verb of the test's own, ``capibara try``."""
    module: Any = types.ModuleType("capibara.cli.try")
    module.HELP = "Try something."
    module.seen = None

    def add_arguments(parser: Any) -> None:
        parser.add_argument("things", nargs="*")
        parser.add_argument("--flag", action="store_true")
        parser.add_argument("--number", type=int)

    def run(args: Any) -> int:
        module.seen = args
        return 0

    module.add_arguments, module.run = add_arguments, run
    monkeypatch.setitem(sys.modules, "capibara.cli.try", module)
    monkeypatch.setitem(VERBS, "try", "try something")
    return module


def test_help_lists_every_verb_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from capibara.cli import main; code = main(['--help']);"
        "heavy = {'jax', 'numpy', 'pydantic', 'rich', 'matplotlib', 'optax', 'orbax'} & set(sys.modules);"
        "sys.exit(code or len(heavy))"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in VERBS:
        assert f"  {name} " in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"capibara {capibara.__version__}\n"


def test_as_a_module() -> None:
    assert python("-m", "capibara", "--version").stdout == f"capibara {capibara.__version__}\n"
    assert python("-m", "capibara").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no verb 'trian'. Did you mean 'train'?"),
        (["--verison"], "no option '--verison'. Did you mean '--version'?"),
        (["xyzzy"], "no verb 'xyzzy'. The verbs are: train, generate"),
    ],
)
def test_unknown_verbs(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_options_and_words_in_any_order(verb: Any) -> None:
    assert main(["try", "a", "--flag", "b=1", "--number", "3", "c"]) == 0
    assert (verb.seen.things, verb.seen.flag, verb.seen.number) == (["a", "b=1", "c"], True, 3)


def test_an_unknown_option_is_told_the_nearest(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--flga"]) == 2
    assert "Did you mean '--flag'?" in capsys.readouterr().err
    assert main(["try", "--fla"]) == 2
    assert main(["try", "--number", "x"]) == 2
    assert verb.seen is None


def test_help_of_a_verb(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "--help"]) == 0
    assert "Try something." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (ConfigError("x=1 is wrong"), 2, "capibara: x=1 is wrong\n"),
        (KeyboardInterrupt(), 130, "capibara: interrupted\n"),
        (RunLockedError("in use"), 2, "capibara: in use\n"),
        # These may go away, so that a launcher is to try again.
        (CheckpointWriteError("no space"), 1, "capibara: no space\n"),
        (ProcessesError("process 0 failed"), 1, "capibara: process 0 failed\n"),
    ],
)
def test_errors_become_codes_without_a_traceback(
    verb: Any, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, message: str
) -> None:
    def run(args: Any) -> int:
        raise raised

    verb.run = run
    assert main(["try"]) == code
    assert capsys.readouterr().err == message


def test_other_errors_are_not_hidden(verb: Any) -> None:
    def run(args: Any) -> int:
        raise ZeroDivisionError

    verb.run = run
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_the_verbs_own_code_is_returned(verb: Any) -> None:
    verb.run = lambda args: 1
    assert main(["try"]) == 1


def test_a_missing_module_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(VERBS, "gone", "not there")
    assert main(["gone"]) == 2
    assert "lacks the module capibara.cli.gone" in capsys.readouterr().err


def test_a_reader_that_closes_early() -> None:
    code = (
        "import sys, types; from capibara.cli import VERBS, main\n"
        "module = types.ModuleType('capibara.cli.spam'); module.HELP = ''\n"
        "module.add_arguments = lambda parser: None\n"
        "def run(args):\n"
        "    while True: print('spam' * 1000)\n"
        "module.run = run; VERBS['spam'] = ''; sys.modules['capibara.cli.spam'] = module\n"
        "sys.exit(main(['spam']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(4)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    """Whatever the tests run in has done with SIGTERM, here it has the system's own action."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_a_verb_as_an_exception(
    verb: Any, capsys: pytest.CaptureFixture[str], default_sigterm: None
) -> None:
    cleared = []

    def run(args: Any) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            # `timeout` sends a second one at once: it does not come between.
            signal.raise_signal(signal.SIGTERM)
            cleared.append(True)
        return 0

    verb.run = run
    assert main(["try"]) == 143
    assert cleared == [True]
    assert capsys.readouterr().err == "capibara: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_later_sigterm_counts_again(monkeypatch: pytest.MonkeyPatch, default_sigterm: None) -> None:
    # The first exception may have been lost, in a destructor say.
    monkeypatch.setattr("capibara.cli._signals._AT_ONCE", -1.0)
    with raise_on_sigterm():
        for _ in range(2):
            with pytest.raises(Terminated):
                signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("name", ["try", "train"])
def test_other_handlers_of_sigterm_stay(
    verb: Any, monkeypatch: pytest.MonkeyPatch, default_sigterm: None, name: str
) -> None:
    found: list[Any] = []
    verb.run = lambda args: found.append(signal.getsignal(signal.SIGTERM)) or 0
    monkeypatch.setitem(sys.modules, f"capibara.cli.{name}", verb)

    def own(*_: object) -> None:
        raise AssertionError

    signal.signal(signal.SIGTERM, own)
    assert main([name]) == 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert main([name]) == 0
    assert found[0] is own
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # A training run stops between two steps instead: its own handler, and none before it is there.
    assert (found[1] is signal.SIG_DFL) == (name == "train")


def test_a_verb_in_another_thread_installs_nothing(verb: Any, default_sigterm: None) -> None:
    found: list[Any] = []
    verb.run = lambda args: found.append(signal.getsignal(signal.SIGTERM)) or 0
    thread = threading.Thread(target=main, args=(["try"],))
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]


def test_json_has_null_where_a_number_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    values = {
        "a": [float("nan"), 1.5, (float("inf"), None)],
        "b": {"c": -float("inf"), "d": "NaN", "e": True},
    }
    print_json(values)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found == {"a": [None, 1.5, [None, None]], "b": {"c": None, "d": "NaN", "e": True}}


def test_every_verb_prints_json_that_way() -> None:
    folder = Path(capibara.cli.__file__).parent
    printing = {path.name for path in folder.glob("*.py") if "json.dumps(" in path.read_text()}
    # The other is for a process of its own, which reads it.
    assert printing == {"_json.py", "_bundles.py"}
