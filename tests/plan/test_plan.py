"""The plan as an object: construction, equality, round trips, changes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.strategies import plans
from torsh_distributed.errors import ConfigurationError
from torsh_distributed.plan import DdpConfig, MeshConfig, Plan, PlanDifference, TrainingConfig
from torsh_distributed.plan.describing import field_texts
from torsh_distributed.plan.plan_sections import PlanArguments
from torsh_distributed.plan.problems import keys_of, sections_of


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml"])
@given(plan=plans())
@settings(max_examples=25)
def test_a_saved_plan_loads_as_an_equal_one(tmp_path_factory: pytest.TempPathFactory, suffix: str, plan: Plan) -> None:
    path = tmp_path_factory.mktemp("plan") / f"plan{suffix}"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert loaded.hash == plan.hash
    assert loaded.diff(plan) == ()
    for key in keys_of(Plan):
        assert type(loaded.value(key)) is type(plan.value(key)), key
    plan.save(path, with_defaults=False)
    assert Plan.load(path) == plan


@given(plan=plans())
@settings(max_examples=50)
def test_a_plan_survives_dict_pickle_and_copy(plan: Plan) -> None:
    for twin in (Plan.from_dict(plan.to_dict()), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert twin == plan
        assert hash(twin) == hash(plan)
        assert type(twin) is Plan


@given(one=plans(), other=plans())
@settings(max_examples=50)
def test_plans_are_equal_exactly_if_nothing_differs(one: Plan, other: Plan) -> None:
    assert (one == other) == (one.diff(other) == ()) == (one.hash == other.hash)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*sections_of(Plan), "meshes"])
keys = st.sampled_from([key.partition(".")[2] for key in keys_of(Plan)] + ["memory_strategy", "timeout", "dp_size"])


@given(document=st.dictionaries(names, json_values | st.dictionaries(keys, json_values, max_size=4), max_size=4))
@settings(max_examples=200)
def test_whatever_a_file_holds_it_is_a_plan_or_a_configuration_error(document: dict[str, Any]) -> None:
    with suppress(ConfigurationError):  # any other exception fails the test
        plan = Plan.from_dict(document)
        assert Plan.from_dict(plan.to_dict()) == plan


def test_degrees_may_be_given_flat() -> None:
    assert Plan(dp=2, tp=4) == Plan(mesh=MeshConfig(dp=2, tp=4))
    assert Plan(dp=2).replace(tp=2) == Plan(dp=2, tp=2)


def test_the_mesh_is_given_in_one_way() -> None:
    with pytest.raises(ConfigurationError, match="the mesh is given twice: as mesh and as dp"):
        Plan(dp=2, mesh=MeshConfig(tp=2))


def test_construction_names_the_argument_that_is_wrong() -> None:
    with pytest.raises(ConfigurationError, match=r"Plan: mesh\.dp must be a number of ranks, .*; got 'two'"):
        Plan(dp="two")  # type: ignore[typeddict-item]
    with pytest.raises(ConfigurationError, match="DdpConfig: max_bucket_size_mb must be a number, above 0; got -1"):
        DdpConfig(max_bucket_size_mb=-1)
    with pytest.raises(ConfigurationError) as caught:
        TrainingConfig(step=3)  # type: ignore[call-arg]
    assert caught.value.hint == "did you mean steps?"


def test_the_typed_arguments_are_the_sections_and_the_degrees() -> None:
    expected = {name: field.annotation for name, field in Plan.model_fields.items()}
    expected |= dict.fromkeys(MeshConfig.model_fields, int)
    assert get_type_hints(PlanArguments) == expected


def test_a_plan_cannot_be_changed_but_replaced() -> None:
    plan = Plan(dp=2)
    with pytest.raises(Exception, match="frozen"):
        plan.mesh.dp = 3  # type: ignore[misc]
    changed = plan.replace(training={"steps": 5}, ddp=DdpConfig(static_graph=True))
    assert changed.diff(plan) == (
        PlanDifference("ddp.static_graph", True, False),
        PlanDifference("training.steps", 5, 1000),
    )
    assert changed.replace(training={"seed": 1}).training == TrainingConfig(steps=5, seed=1)
    assert plan == Plan(dp=2)


def test_a_wrong_change_is_refused_under_its_full_key() -> None:
    with pytest.raises(ConfigurationError, match=r"training\.steps must be an integer, at least 1; got 0"):
        Plan().replace(training={"steps": 0})
    with pytest.raises(ConfigurationError, match="trainig is not a key of a plan"):
        Plan().replace(trainig={"steps": 0})


def test_a_plan_prints_what_sets_it_apart() -> None:
    plan = Plan(dp=2, training=TrainingConfig(steps=5))
    assert repr(plan) == str(plan) == "Plan(mesh={'dp': 2}, training={'steps': 5})"
    assert repr(Plan()) == "Plan()"


def test_every_key_has_a_text_and_every_optional_one_is_off_by_default() -> None:
    for name, section in sections_of(Plan).items():
        assert section.__doc__
        for key, field in section.model_fields.items():
            assert field_texts(section)[key], f"{name}.{key} has no text under it"
            may_be_none = type(None) in getattr(field.annotation, "__args__", ())
            # TOML has no null: a key that could be none but is not by default could not be saved.
            assert not may_be_none or field.default is None, f"{name}.{key}"


def test_another_process_gives_the_same_hash_and_imports_no_more_of_torch_than_the_errors_do() -> None:
    code = """
import sys
from contextlib import suppress
import torsh_distributed.errors
before = {name for name in sys.modules if name.split(".")[0] == "torch"}
import torsh_distributed.plan, torsh_distributed.plan.pages
print(sorted({name for name in sys.modules if name.split(".")[0] == "torch"} - before))
print(torsh_distributed.plan.Plan(dp=2).hash)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["[]", Plan(dp=2).hash]
