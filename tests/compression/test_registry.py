"""Rules and outer steps of installed packages: found by name, of one version, and no trouble if they are broken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from equipoise.averaging.options import RunOptions
from equipoise.averaging.outer import parse_outer
from equipoise.averaging.rules import parse_rule
from equipoise.averaging.schema import Schema
from equipoise.averaging.spec import RunSpec, SpecError

MODULE = """
import torch
from equipoise.averaging.outer import OuterStep
from equipoise.averaging.rules import Reduced, Rule
from equipoise.compression.grammar import decimal, whole

class Largest(Rule):
    options = {"scale": decimal(1), "times": whole(2)}

    def __init__(self, scale, times):
        if times > 5:
            raise ValueError("at most\\nfive times")
        self.factor = scale * times

    def reduce(self, rows, weights):
        return Reduced(rows.amax(0) * self.factor, weights / weights.sum())

class Half(OuterStep):
    moments = ("last",)

    def __init__(self):
        super().__init__("half")

    def move(self, parameter, mean, moments):
        parameter.sub_(mean * 0.5)
        moments[0].copy_(mean)

class Odd(Rule):
    options = ["scale"]
    reduce = None

def function(): pass
"""

ENTRIES = """
[equipoise.rules]
largest = THING:Largest
odd = THING:Odd
no-rule = THING:Half
function = THING:function
gone = THING:Gone
missing = THING_that_is_not_there:Gone

[equipoise.outer]
half = THING:Half
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package on the path, by its name and version."""

    def put(name: str = "robust", version: str = "1.2.0", entries: str = ENTRIES) -> None:
        module = f"{name}_thing"
        folder = tmp_path / f"{name}-{version}"
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "entry_points.txt").write_text(entries.replace("THING", module))
        (folder / f"{module}.py").write_text(MODULE)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return put


def test_a_rule_of_a_package_is_found_and_its_version_is_part_of_its_spec(install: Install) -> None:
    install()
    rule = parse_rule("largest:times=3")
    assert rule.spec == "largest:scale=1,times=3,version=1.2.0"
    assert parse_rule(rule.spec).spec == rule.spec
    values = rule.reduce(torch.tensor([[1.0, 5.0], [2.0, 4.0]]), torch.ones(2, dtype=torch.float64)).values
    assert values.tolist() == [6.0, 15.0]


def test_an_outer_step_of_a_package_is_found(install: Install) -> None:
    install(version="2.0+local")
    outer = parse_outer("half")
    assert str(outer) == str(parse_outer(str(outer))) == "half:version=2.0+local"
    agreed = {"w": torch.ones(2)}
    outer.step(agreed, {"w": torch.full((2,), 0.5)})
    assert agreed["w"].tolist() == [0.75, 0.75]
    assert outer.state_dict()["last"]["w"].tolist() == [0.5, 0.5]


def test_peers_with_other_versions_do_not_meet(install: Install) -> None:
    def run() -> RunSpec:
        return RunSpec.create("run", Schema.of({"w": torch.zeros(3)}), RunOptions(rule="largest"))

    install(version="1.2.0")
    first = run()
    install(version="1.3.0")
    assert run().hash != first.hash
    with pytest.raises(
        SpecError,
        match=r"\Alargest: version is 1\.3\.0, the version of the package robust here, not '1\.2\.0'\Z",
    ):
        RunSpec.create("run", first.schema, first.options)


def test_own_rules_come_before_those_of_packages(install: Install) -> None:
    install(entries="[equipoise.rules]\nmean = THING:Gone\n")
    assert parse_rule("mean").spec == "mean"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("lagest", "unknown rule 'lagest'; .*trimmed.* largest.*did you mean 'largest'.*"),
        ("largest:time=3", "largest has no option 'time'; .*did you mean 'times'.*"),
        ("largest:times=6", ".*'largest' of the package robust refuses: ValueError: at most five times"),
        ("odd", ".*'odd' of the package robust: expected `options` to be options by name"),
        ("no-rule", ".*'no-rule' of the package robust is no subclass of Rule"),
        ("function", ".*'function' of the package robust is no subclass of Rule"),
        ("gone", ".*'gone' of the package robust does not load: AttributeError: .*"),
        ("missing", ".*'missing' of the package robust does not load: ModuleNotFoundError: .*"),
        ("half", "unknown rule 'half'; .*"),
    ],
)
def test_a_fault_of_a_package_is_an_error_of_one_line(install: Install, spec: str, said: str) -> None:
    install()
    with pytest.raises(ValueError, match=rf"\A{said}\Z"):
        parse_rule(spec)


def test_two_packages_with_one_name_are_told(install: Install) -> None:
    install()
    install("other", "3.0")
    with pytest.raises(ValueError, match=r"\A2 packages have a equipoise.rules 'largest': .*robust.*\Z"):
        parse_rule("largest")


def test_the_whole_spec_keeps_to_the_limit_of_specs(install: Install) -> None:
    install(version="1." + "0" * 30)
    with pytest.raises(ValueError, match=r"\Alargest: its whole rule spec is longer than 64 characters\Z"):
        parse_rule("largest:scale=0.12345678901")
    install(version="1." + "0" * 40)
    with pytest.raises(ValueError, match=r"has no version of up to 32 characters, but '1.0*"):
        parse_rule("largest")
