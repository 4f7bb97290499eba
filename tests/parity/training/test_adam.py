"""AdamW in NumPy, with no knob turned and with each; moments between torch and optax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

from jaxtwin.configs import BadInput
from jaxtwin.configs.runs import AdamW
from jaxtwin.parity.selftest.optimizer_faults import CONFIG, STEPS, lively, reference, tiny
from jaxtwin.parity.sides import runs
from jaxtwin.parity.table.tensors import Tensor
from jaxtwin.parity.training import adam, moments
from jaxtwin.parity.training.adam import How, ObservedStep, Part, Setting, State, Step
from jaxtwin.parity.training.adam_hypotheses import HYPOTHESES, Divergence, explain
from jaxtwin.parity.training.torch_training import TorchSide, random_batches
from jaxtwin.parity.training.trajectory import JaxSide, optimizer
from jaxtwin.tests.helpers import kit
from jaxtwin.tests.helpers.levels import slow

PLAIN = AdamW(
    peak=0.01, warmup=0, schedule="constant", b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1
)
ONE = Setting(PLAIN, 100, frozenset({"w"}), frozenset(), {"w": "w"}, False)


def steps(setting: Setting, w: list[float], grads: list[list[float]], how: How = adam.RIGHT) -> Any:
    """The weights after those gradients."""
    state = State(0, {"w": np.array(w)}, {"w": np.zeros(len(w))}, {"w": np.zeros(len(w))})
    for g in grads:
        result = adam.step(setting, state, [Part({"w": np.array(g)}, 1)], how)
        params = {"w": state.params["w"] + result.update["w"]}
        state = State(state.count + 1, params, result.mu, result.nu)
    return state.params["w"]


def test_two_steps_worked_out_by_hand() -> None:
    found = steps(ONE, [1.0, -2.0, 3.0], [[0.1, -0.2, 0.3], [-0.3, 0.1, 0.05]])
    assert found.round(6).tolist() == [0.992953, -1.983349, 2.976180]


def test_warm_up_and_cosine() -> None:
    config = replace(PLAIN, peak=1.0, warmup=4, schedule="cosine")
    due = [0, 0.25, 0.5, 0.75, 1, 0.93301, 0.75, 0.5, 0.25, 0.06699, 0, 0, 0]
    assert [round(adam.rate(config, 10, i), 5) for i in range(13)] == due


def test_the_norm_is_clipped() -> None:
    both = adam.clipped({"a": np.array([3.0]), "b": np.array([4.0])}, 1.0)
    assert [float(both[n][0]) for n in "ab"] == pytest.approx([0.6, 0.8], rel=1e-15)
    assert adam.clipped({"a": np.array([0.3])}, 1.0) == {"a": 0.3}
    assert adam.clipped({"a": np.zeros(2)}, 1.0)["a"].tolist() == [0, 0]


def test_with_no_knob_turned_it_is_torchs_adamw() -> None:
    setting = Setting.of(tiny(), CONFIG, STEPS)
    for observed in reference():
        found = adam.step(setting, observed.before, observed.parts)
        assert adam.agree(found, observed.result), adam.errors(found, observed.result)
        for name, x in observed.before.params.items():
            after = x + observed.result.update[name]
            assert kit.apart(x + found.update[name], after) <= 1e-15


def test_the_reference_shows_what_it_must() -> None:
    """Some gradients clipped and some not, a rate of 0, a warm-up and a decay."""
    setting = Setting.of(tiny(), CONFIG, STEPS)
    norms = [adam.norm(adam.gradient(setting, s.parts, How(clip="none"))) for s in reference()]
    assert min(norms) < 0.1
    assert max(norms) > 2
    assert [s.before.count for s in reference()] == list(range(7))
    sizes = [len({p.tokens for p in s.parts}) for s in reference()]
    assert min(sizes) == 2  # micro-batches with different numbers of targets
    assert setting.decayed.isdisjoint({"norm.weight", "layers.0.pre_attn.weight"})
    assert {"embed.weight", "layers.1.attn.q.weight"} < setting.decayed


WAYS = [
    (known.name, how)
    for known in HYPOTHESES
    for how, _ in known.ways(Divergence(Setting.of(tiny(), CONFIG, STEPS), ()))
]
FITTED = [  # numbers that no default gives away
    ("b1", How(numbers={"b1": 0.87654321})),
    ("b2", How(numbers={"b2": 0.97654321})),
    ("eps", How(numbers={"eps": 3.3e-7})),
    ("clip", How(numbers={"clip": 0.7654321})),
    ("weight-decay", How(numbers={"weight_decay": 0.012345678})),
    ("rate-scale", How(scale=0.98765432)),
]


@pytest.mark.parametrize(
    ("name", "how"), WAYS + FITTED, ids=lambda x: x if isinstance(x, str) else ""
)
def test_every_mistake_stands_alone(name: str, how: How) -> None:
    """Each way to make it is called by its name, and no other mistake looks the same."""
    setting, most = Setting.of(tiny(), CONFIG, STEPS), {}
    observed = tuple(
        ObservedStep(s.before, s.parts, adam.step(setting, s.before, s.parts, how, most))
        for s in reference()
    )
    causes = explain(Divergence(setting, observed))
    assert [(c.name, c.proven, c.part) for c in causes] == [(name, True, "optimizer")]


def test_what_is_right_has_no_cause_and_what_is_not_known_has_none() -> None:
    setting = Setting.of(tiny(), CONFIG, STEPS)
    assert explain(Divergence(setting, reference())) == []
    odd = [
        replace(s, result=replace(s.result, mu={n: x * (1 + 1e-9) for n, x in s.result.mu.items()}))
        for s in reference()
    ]
    assert explain(Divergence(setting, tuple(odd))) == []


def test_two_mistakes_together_are_not_named() -> None:
    setting = Setting.of(tiny(), CONFIG, STEPS)
    how = How(decays="none", correct_mu=False)
    observed = [replace(s, result=adam.step(setting, s.before, s.parts, how)) for s in reference()]
    assert explain(Divergence(setting, tuple(observed))) == []


def test_what_the_steps_cannot_tell_apart_is_said() -> None:
    """Where no update is over the clip, clipping updates is not clipping."""
    setting = Setting.of(tiny(), replace(CONFIG, peak=1e-2), STEPS)
    how = How(clip="none")
    observed = [replace(s, result=adam.step(setting, s.before, s.parts, how)) for s in reference()]
    causes = {c.name: c for c in explain(Divergence(setting, tuple(observed)))}
    assert causes.keys() == {"clip-missing", "clip-of-update"}
    assert not any(c.proven for c in causes.values())
    assert "or clip-of-update: on these steps they are the same" in causes["clip-missing"].about


# ---- moments -------------------------------------------------------------------------------------


def trained(count: int, dtype: str = "float64") -> TorchSide:
    side = TorchSide(tiny(), narrow(dtype), CALM, 20, dtype)
    for batch in BATCHES[:count]:
        side.step(batch, 2)
    return side


def narrow(dtype: str) -> dict[str, Tensor]:
    return {n: Tensor.of(t.read().astype(dtype)) for n, t in lively(tiny()).items()}


CALM = replace(CONFIG, peak=1e-2)  # ten steps at 0.1 make much of a rounding
BATCHES = random_batches(tiny(), 10)


def optax_of(layout: str) -> Any:
    from jaxtwin.jaxmodel import abstract, axes

    return optimizer(CALM, 20, axes.letters(abstract(tiny(), layout=layout)))


@pytest.mark.parametrize("layout", ["scan", "unroll"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_moments_come_back_bit_for_bit(layout: str, dtype: str) -> None:
    state = trained(3, dtype).optimizer.state_dict()
    with jax.enable_x64(dtype == "float64"):
        src = moments.to_optax(tiny(), state, optax_of(layout), layout)
        assert {int(x) for _, x in optax.tree.get_all_with_path(src, "count")} == {3}
        back = moments.to_torch(tiny(), src, state, layout)
    assert back["param_groups"] == state["param_groups"]
    assert back["state"].keys() == state["state"].keys()
    for number, entry in state["state"].items():
        assert back["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(back["state"][number][key], value)
            assert back["state"][number][key].dtype == value.dtype


def params(side: Any) -> dict[str, Tensor]:
    return {name: Tensor.of(x) for name, x in side.state().params.items()}


def same(a: State, b: State) -> None:
    assert a.count == b.count
    for kept in ("params", "mu", "nu"):
        for name, x in getattr(b, kept).items():
            assert kit.apart(getattr(a, kept)[name], x) <= 1e-12, (kept, name)


@pytest.mark.parametrize("layout", ["scan", slow("unroll")])
def test_five_steps_of_each_are_ten_of_torch(x64: None, layout: str) -> None:
    uninterrupted, half = trained(10).state(), trained(5)

    ours = JaxSide(tiny(), params(half), CALM, 20, "float64", layout)
    given = half.optimizer.state_dict()
    ours.opt_state = moments.to_optax(tiny(), given, ours.optimizer, layout)
    for batch in BATCHES[5:]:
        ours.step(batch, 2)
    same(ours.state(), uninterrupted)

    first = ours.again(lively(tiny()))
    for batch in BATCHES[:5]:
        first.step(batch, 2)
    theirs = TorchSide(tiny(), params(first), CALM, 20, "float64")
    like = theirs.optimizer.state_dict()
    theirs.optimizer.load_state_dict(moments.to_torch(tiny(), first.opt_state, like, layout))
    theirs.count = 5
    for batch in BATCHES[5:]:
        theirs.step(batch, 2)
    same(theirs.state(), uninterrupted)


def test_what_cannot_be_carried_is_refused() -> None:
    spec, optimizer = tiny(), optax_of("scan")
    state = trained(2, "float32").optimizer.state_dict()
    unnamed = torch.optim.AdamW(runs.torch_model(spec, lively(spec), "float32").parameters())
    with pytest.raises(BadInput, match=r"named_parameters\(\)"):
        moments.to_optax(spec, unnamed.state_dict(), optimizer)
    with pytest.raises(BadInput, match="make a step first"):
        moments.to_optax(spec, trained(0).optimizer.state_dict(), optimizer)
    with pytest.raises(BadInput, match="enable_x64"):
        moments.to_optax(spec, trained(1).optimizer.state_dict(), optimizer)
    with pytest.raises(BadInput, match="does not hold this model's tensors"):
        moments.to_optax(tiny(kv=4), state, optimizer)
    src = moments.to_optax(spec, state, optimizer)
    state["state"][0]["step"] = torch.tensor(7.0)
    with pytest.raises(BadInput, match=r"different steps: \[2, 7\]"):
        moments.to_optax(spec, state, optimizer)
    with pytest.raises(BadInput, match="0 trees called mu"):
        moments.to_torch(spec, optax.sgd(0.1).init({}), state)
    other = TorchSide(tiny(tied=False), lively(tiny(tied=False)), CALM, 20, "float32")
    with pytest.raises(BadInput, match=r"differ in 1 parameters, e.g. \['head.weight'\]"):
        moments.to_torch(spec, src, other.optimizer.state_dict())


def test_a_step_is_data() -> None:
    """What explains is made of plain arrays: nothing in it is torch's or JAX's."""
    for observed in reference():
        assert isinstance(observed.result, Step)
        assert all(type(x) is np.ndarray for x in observed.result.update.values())
