"""Which strategies a plan may use, and what is said about the others."""

from costmodel.price import Pricer
from plans.memory import phase_memory
from plans.model import Precision
from plans.presets import load_cluster, load_model
from solver.candidates import equal_strategies, find_candidates, why_it_does_not_fit
from tests.solver.problems import shipped_profile


def pricer(model: str, cluster: str, memory_bytes: int | None = None) -> Pricer:
    machine = load_cluster(cluster)
    if memory_bytes is not None:
        machine = machine.model_copy(update={"memory_bytes": memory_bytes})
    return Pricer(load_model(model), machine, Precision.bf16, shipped_profile())


def test_every_division_into_equal_replicas_is_looked_at() -> None:
    """Powers of two only would miss the best strategy of 12 ranks."""
    found = [str(strategy) for strategy in equal_strategies(12)]
    assert len(found) == len(set(found)) == 18  # tp x pp x dp = 12 has 18 ordered solutions
    assert {"dp12", "dp4tp3", "dp2tp2pp3", "tp12", "pp12", "dp6pp2"} <= set(found)


def test_each_refused_strategy_has_its_reason() -> None:
    """A user who misses a strategy is told why, with the nearest legal value."""
    candidates, refused = find_candidates(pricer("llama-7b", "a800-80g:3x8"), shortest_row=64, longest=32768)
    reasons = {each.strategy: each.reason for each in refused}
    assert "nearest legal tp is 2" in reasons["dp8tp3"]
    assert {"dp24", "dp12tp2", "dp3tp8", "dp2tp4pp3"} <= {candidate.text for candidate in candidates}
    assert len([c for c in candidates if "cp" not in c.text]) + len(refused) == len(list(equal_strategies(24)))


def test_a_tensor_parallel_degree_without_times_is_refused_and_says_so() -> None:
    """The 13B profile has no tp 5, which its 40 heads would allow."""
    _, refused = find_candidates(pricer("llama-13b", "a800-80g:1x5"), shortest_row=64, longest=4096)
    assert any(each.strategy == "tp5" and "no times for tp 5" in each.reason for each in refused)


def test_a_strategy_that_holds_no_useful_row_is_refused_for_its_memory() -> None:
    """It would only make plans that cannot run."""
    candidates, refused = find_candidates(pricer("llama-13b", "a800-80g:1x8"), shortest_row=512, longest=4096)
    assert "dp8" not in [candidate.text for candidate in candidates]
    assert any(each.strategy == "dp8" and each.reason.startswith("memory: ") for each in refused)


def test_the_room_of_a_micro_batch_is_exact_beside_every_home() -> None:
    """One row more would not fit: the limit is neither wasteful nor optimistic."""
    prices = pricer("llama-7b", "a800-80g:1x8")
    candidates, _ = find_candidates(prices, shortest_row=64, longest=10**6)
    memory_bytes = prices.cluster.memory_bytes
    assert any("cp" in candidate.text for candidate in candidates)
    for candidate in candidates:
        kind = candidate.phase.strategy.kinds[0]
        assert list(candidate.max_tokens) == ["none", "selective", "full"]
        for recompute, limits in candidate.max_tokens.items():
            for home, limit in zip(candidates, limits, strict=True):
                for tokens, fits in ((limit, True), (limit + kind.tp * kind.cp, False)):
                    ranks = phase_memory(
                        candidate.phase, home.home, (tokens,), prices.memory_rule, prices.precision, recompute
                    )
                    assert (max(rank.total for rank in ranks) <= memory_bytes) is fits


def test_context_parallelism_is_tried_with_the_largest_tp_of_a_node() -> None:
    """Two nodes of 8: with tp 8, since tp 16 would leave its node. All strategies would make the search slow."""
    candidates, _ = find_candidates(pricer("llama-7b", "a800-80g:2x8"), shortest_row=64, longest=4096)
    assert [c.text for c in candidates if "cp" in c.text] == ["tp8cp2"]


def test_context_parallelism_is_tried_with_every_tp_where_memory_asks_for_it() -> None:
    """A sequence that no other strategy holds."""
    candidates, _ = find_candidates(pricer("llama-13b", "a800-80g:1x8"), shortest_row=64, longest=10**6)
    assert {"tp2cp4", "tp2cp2pp2"} <= {c.text for c in candidates}


def test_what_is_missing_is_said_with_numbers() -> None:
    """`no plan` alone sends the user guessing."""
    said = why_it_does_not_fit(pricer("llama-32b", "a800-80g:2x8"), 32768)
    assert "GiB more per rank under tp16" in said and "--max-len" in said
    nothing = why_it_does_not_fit(pricer("llama-7b", "a800-80g:1x8", memory_bytes=2**30), 128)
    assert "no sequence fits at all" in nothing
