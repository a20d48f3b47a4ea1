"""Nothing in the package can run code out of a file, and nothing in the repository names one machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.house.source import ROOT, called, imports, nodes, python_files, text_files, where

CODE_FROM_FILES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "runpy",
}
FORBIDDEN_CALLS = {
    "eval": "give the value a small grammar",
    "exec": "write the code down",
    "torch.load": "use safetensors",
    "torch.save": "use safetensors",
    "yaml.load": "use yaml.safe_load",
    "yaml.unsafe_load": "use yaml.safe_load",
    "yaml.full_load": "use yaml.safe_load",
    "torch.hub.load": "it runs a repository's code",
    "torch.serialization.load": "use safetensors",
    "__import__": "name the module",
    "subprocess.getoutput": "use subprocess.run with a list",
    "subprocess.getstatusoutput": "use subprocess.run with a list",
    "hydra.utils.instantiate": "a config names values, not code",
    "instantiate": "a config names values, not code",
    "os.system": "use subprocess.run with a list",
    "os.popen": "use subprocess.run with a list",
}
# SECURITY.md ("Formats") says why each is safe. The writer of Megatron checkpoints needs torch's own format; bench/
# trains with the scripts of others.
EXCEPTIONS = {
    ("rather/checkpoint/dist_metadata.py", "pickle"),
    ("rather/cluster/bridge.py", "pickle"),
    ("rather/config/plugins.py", f"exec(): {FORBIDDEN_CALLS['exec']}"),
    ("rather/tools/megatron_file.py", "torch.distributed.checkpoint.filesystem"),
    ("rather/tools/megatron_file.py", "torch.distributed.checkpoint.state_dict_saver"),
    ("rather/tools/megatron_file.py", "torch.save(): use safetensors"),
    ("bench/trl_door.py", "runpy"),
}
DOORS_OF_PICKLE = ("torch.distributed.checkpoint", "ray.cloudpickle")
FORBIDDEN_KEYWORDS = {
    "trust_remote_code": True,
    "allow_pickle": True,
    "shell": True,
    "weights_only": False,
}
MACHINE_PATH = re.compile(r"(?<![\w.:-])/(?:work|root|home|Users|opt|mnt)/[\w.]")
BESIDE_THE_CHECKOUT = re.compile(r"\.\./shared")


def calls_that_run_code(code: Iterable[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    for node in code:
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        if name in FORBIDDEN_CALLS:
            yield node, f"{name}(): {FORBIDDEN_CALLS[name]}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in FORBIDDEN_KEYWORDS and value is FORBIDDEN_KEYWORDS[keyword.arg]:
                yield node, f"{keyword.arg}={value}"


@pytest.mark.defect("M7")
def test_no_code_is_loaded_from_files() -> None:
    files = python_files("rather", "examples", "bench")
    found = {
        (where(file), name)
        for file in files
        for name, _ in imports(file)
        if name.split(".")[0] in CODE_FROM_FILES or name.startswith(DOORS_OF_PICKLE)
    }
    found |= {(where(file), what) for file in files for _, what in calls_that_run_code(nodes(file))}
    assert sorted(found - EXCEPTIONS) == [], "a new one"
    assert sorted(EXCEPTIONS - found) == [], "no longer there"
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert [file for file, _ in EXCEPTIONS if f"`{file}`" not in page] == ["bench/trl_door.py"]


@pytest.mark.parametrize(
    "line", ["eval(text)", "torch.load(path)", "f(trust_remote_code=True)", "run(x, shell=True)"]
)
def test_the_rule_can_fail(line: str) -> None:
    assert list(calls_that_run_code(ast.walk(ast.parse(line))))


def test_target_is_named_only_to_refuse_it() -> None:
    found = [
        where(file, node)
        for file in python_files("rather", "examples")
        if file.relative_to(ROOT).parts[:2] != ("rather", "config")
        for node in nodes(file)
        if isinstance(node, ast.Constant) and node.value == "_target_"
    ]
    assert not found, f"_target_ belongs to the config loader, which refuses it: {found}"
    configs = [file for file in text_files() if file.suffix in {".yaml", ".yml"}]
    assert not lines_with(re.compile(r"\b_target_\b"), configs)


def lines_with(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    return [
        f"{where(file)}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def readable() -> list[Path]:
    return [
        file
        for file in text_files()
        if file.suffix not in {".gz", ".parquet", ".arrow", ".png", ".svg"}
    ]


def test_no_path_of_one_machine() -> None:
    assert not lines_with(MACHINE_PATH, readable())
    assert MACHINE_PATH.search("open('/home" + "/someone/data')")


def test_only_ci_reads_outside_the_checkout() -> None:
    others = [
        file
        for file in readable()
        if where(file) not in {".ci/run", "tests/house/test_forbidden.py"}
    ]
    assert not lines_with(BESIDE_THE_CHECKOUT, others)


STAMPS = {
    "rather/pipeline/timeline.py",
    "rather/cluster/health.py",
    "rather/cluster/resources.py",
    "rather/run_folder/layout.py",
    "rather/coati.py",
    "rather/tracking/trackers.py",
    "rather/pipeline/starts.py",
    "rather/cluster/supervision.py",
}
JUMPING = {"time.time", "datetime.now", "datetime.utcnow"}
ASKING_FOR_NAMES = {
    "socket.gethostbyname",
    "socket.getaddrinfo",
    "socket.getfqdn",
    "socket.gethostbyaddr",
}


def calls(*names: str) -> set[str]:
    return {
        where(file)
        for file in python_files("rather")
        for node in nodes(file)
        if isinstance(node, ast.Call) and called(node) in names
    }


def test_a_clock_that_jumps_only_stamps_and_no_name_is_looked_up() -> None:
    """Deadlines and durations are measured by clocks that only go forward; a host may have no DNS."""
    assert (
        calls(*JUMPING) - {"rather/data/template.py"} <= STAMPS
    )  # a template may ask for the date
    assert not calls(*ASKING_FOR_NAMES)
    assert calls("time.monotonic")


def test_tests_do_not_sleep() -> None:
    sleeping = [
        where(file, node)
        for file in python_files("tests")
        for node in nodes(file)
        if isinstance(node, ast.Call) and called(node) in {"time.sleep", "sleep"}
    ]
    assert not sleeping, f"wait for the event, not for the clock: {sleeping}"
