"""The hot switch on ranks: every weight arrives, every partial is counted once, and the bytes are the priced ones."""

import time
from dataclasses import dataclass
from itertools import pairwise, permutations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from executor.backbone import Backbone, Holding, gradient_dtype, weight_dtype
from executor.exchange import Cargo
from executor.local import RankError as LocalRankError
from executor.local import Tell, run_local
from executor.storage import Storage
from executor.switch import Switcher
from plans.layout import Layout, home_layout, layout
from plans.model import ModelSpec, Precision
from plans.strategy import Strategy
from plans.switch import switch_between
from tests.executor.tiny import make_weights, shards, sum_of_partials
from tests.ranks import RankError, run_ranks

STRATEGIES = ("dp4", "tp4", "pp4", "dp2tp2", "dp2pp2", "tp2pp2")
UNEQUAL = "1xtp2+2xtp1"
HOME = "home"
PAIRS = (
    *permutations((*STRATEGIES, UNEQUAL), 2),
    *((HOME, strategy) for strategy in (*STRATEGIES, UNEQUAL)),
    *((strategy, HOME) for strategy in (*STRATEGIES, UNEQUAL)),
)
RANKS_PER_NODE = 2
SMALL_STAGING = 800  # bytes: sixteen of it are a part of what moves, so every switch takes several rounds
CPU = torch.device("cpu")
PLAIN = Storage(CPU)

# Nothing divides evenly: 5 layers over 4 and 2 stages, 35 rows and 22 columns over tp 4 and 2.
MODEL = ModelSpec(
    name="switch-test", num_layers=5, hidden_size=16, ffn_size=22, num_heads=4, num_kv_heads=4, vocab_size=35
)

Key = tuple[Precision, str, str]


@dataclass(frozen=True)
class Outcome:
    """One switch on one rank."""

    wrong_weights: tuple[str, ...]
    moved_storage: tuple[str, ...]  # of tensors whose box is the same before and after
    before: dict[str, Tensor]  # partial gradients
    after: dict[str, Tensor]
    sent_bytes: dict[int, int]  # in messages, by peer
    pulled_bytes: dict[int, int]  # by the peer that had them
    num_rounds: int


def place(text: str) -> Layout:
    """A layout by its name; home is that of tp2pp2."""
    return home_layout(MODEL, Strategy.parse("tp2pp2")) if text == HOME else layout(MODEL, Strategy.parse(text))


def holding(at: Layout, rank: int, precision: Precision, storage: Storage = PLAIN) -> Holding:
    """Weights of the story and partial sums that are whole numbers, other ones on every rank.

    Masters are in the gradients' format, and home has no gradients yet.
    """
    whole = make_weights(MODEL, dtype=gradient_dtype(precision))
    dtype = gradient_dtype(precision) if at.home else weight_dtype(precision)
    weights = {name: weight.detach().to(dtype) for name, weight in shards(at, rank, whole).items()}
    generator = torch.Generator().manual_seed(rank)
    gradients = {
        name: torch.randint(-99, 99, weight.shape, generator=generator).to(gradient_dtype(precision))
        for name, weight in weights.items()
    }
    return Holding(placed(weights, storage), {} if at.home else placed(gradients, storage))


def placed(tensors: dict[str, Tensor], storage: Storage) -> dict[str, Tensor]:
    """In a storage, where the other ranks of the node can read them."""
    return {name: storage.empty(tuple(t.shape), t.dtype).copy_(t) for name, t in tensors.items()}


def run_pairs(rank: int, world_size: int, precision: Precision, staging_bytes: int, share: bool) -> list[Outcome]:
    switcher = Switcher(precision, RANKS_PER_NODE, staging_bytes, CPU, share=share)
    return [run_pair(switcher, rank, precision, place(source), place(target)) for source, target in PAIRS]


def run_pair(switcher: Switcher, rank: int, precision: Precision, source: Layout, target: Layout) -> Outcome:
    old = holding(source, rank, precision, switcher.storage)
    before = {name: gradient.clone() for name, gradient in old.gradients.items()}
    same = [name for name, box in source.boxes[rank].items() if target.boxes[rank].get(name) == box]
    masters_fit = gradient_dtype(precision) == weight_dtype(precision)
    pointers: dict[tuple[str, str], int] = {}
    if not target.home and (masters_fit or not source.home):
        pointers |= {("weight", name): old.weights[name].data_ptr() for name in same}
    if not source.home:
        pointers |= {("gradient", name): old.gradients[name].data_ptr() for name in same}
    switcher.sent_bytes.clear()
    switcher.pulled_bytes.clear()
    new = switcher.run(source, target, old)
    assert not old.weights or source.home, "a switch leaves no weights behind"
    assert not old.gradients, "a switch leaves no gradients behind"
    expected = {} if target.home else holding(target, rank, precision).weights
    assert new.weights.keys() == expected.keys() and new.gradients.keys() == target.boxes[rank].keys()
    held = {"weight": new.weights, "gradient": new.gradients}
    return Outcome(
        wrong_weights=tuple(name for name, weight in expected.items() if not torch.equal(weight, new.weights[name])),
        moved_storage=tuple(name for (what, name), at in pointers.items() if held[what][name].data_ptr() != at),
        before=before,
        after=new.gradients,
        sent_bytes=dict(switcher.sent_bytes),
        pulled_bytes=dict(switcher.pulled_bytes),
        num_rounds=len(switcher.prepare(source, target).turns),
    )


@pytest.fixture(scope="module")
def outcomes() -> dict[Key, list[Outcome]]:
    """What every rank saw: fp64 in messages and many rounds, bf16 in one round a hop, inside nodes in shared memory."""
    found: dict[Key, list[Outcome]] = {}
    for precision, staging_bytes, share in ((Precision.fp64, SMALL_STAGING, False), (Precision.bf16, 2**20, True)):
        by_rank = run_ranks(4, run_pairs, precision, staging_bytes, share)
        found |= {(precision, *pair): list(ranks) for pair, *ranks in zip(PAIRS, *by_rank, strict=True)}
    return found


@pytest.mark.parametrize("precision", [Precision.fp64, Precision.bf16])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_switch_brings_every_weight_and_counts_every_partial_once(
    outcomes: dict[Key, list[Outcome]], precision: Precision, source: str, target: str
) -> None:
    """Else the next phase trains on wrong weights, or the step on a wrong gradient. Whole numbers: sums are exact."""
    ranks = outcomes[precision, source, target]
    assert [outcome.wrong_weights for outcome in ranks] == [()] * 4
    whole = make_weights(MODEL)
    before = sum_of_partials(place(source), [outcome.before for outcome in ranks], whole)
    after = sum_of_partials(place(target), [outcome.after for outcome in ranks], whole)
    for name, gradient in before.items():
        assert torch.equal(gradient, after[name]), name


@pytest.mark.parametrize("precision", [Precision.fp64, Precision.bf16])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_switch_sends_the_bytes_that_are_priced(
    outcomes: dict[Key, list[Outcome]], precision: Precision, source: str, target: str
) -> None:
    """What is priced is what is sent: else plans are chosen by wrong prices."""
    priced = switch_between(place(source), place(target), RANKS_PER_NODE).bytes_by_pair(precision)
    sent: dict[tuple[int, int], int] = {}
    pulled: dict[tuple[int, int], int] = {}
    for rank, outcome in enumerate(outcomes[precision, source, target]):
        sent |= {(rank, peer): n for peer, n in outcome.sent_bytes.items()}
        pulled |= {(peer, rank): n for peer, n in outcome.pulled_bytes.items()}
    assert sent | pulled == priced
    inside = {pair for pair in priced if pair[0] // RANKS_PER_NODE == pair[1] // RANKS_PER_NODE}
    assert set(pulled) == (inside if precision is Precision.bf16 else set())


def test_a_small_staging_takes_several_rounds(outcomes: dict[Key, list[Outcome]]) -> None:
    """Else the tests above did not try them."""
    assert outcomes[Precision.fp64, "dp4", "tp4"][0].num_rounds > 5
    hops = switch_between(place("dp4"), place("tp4"), RANKS_PER_NODE).num_hops
    assert outcomes[Precision.bf16, "dp4", "tp4"][0].num_rounds == hops > 1


def test_what_stays_is_not_copied(outcomes: dict[Key, list[Outcome]]) -> None:
    """A tensor whose box is the same keeps its storage, weights and gradients alike."""
    assert {
        key: [o.moved_storage for o in ranks] for key, ranks in outcomes.items() if any(o.moved_storage for o in ranks)
    } == {}


def move_apart(
    rank: int, world_size: int, share: bool
) -> tuple[list[tuple[str, str]], list[tuple[str, str]], int, int]:
    """Every pair: weights alone, then gradients alone. Pairs that differ from both together; bytes apart, together."""
    switcher = Switcher(Precision.bf16, RANKS_PER_NODE, 2**20, CPU, share=share)
    odd, disturbed, moved = [], [], []
    for names in PAIRS:
        source, target = map(place, names)
        old = holding(source, rank, Precision.bf16, switcher.storage)
        before = switcher.moved_bytes
        together = switcher.run(source, target, Holding(dict(old.weights), cloned(old.gradients)))
        halfway = switcher.moved_bytes
        apart = Holding(dict(old.weights), dict(old.gradients))
        weights = switcher.run(source, target, apart, Cargo.WEIGHTS)
        stayed = apart.gradients.keys() == old.gradients.keys() and not weights.gradients
        gradients = switcher.run(source, target, apart, Cargo.GRADIENTS)
        if not stayed or apart.gradients or gradients.weights:
            disturbed.append(names)
        if not (alike(weights.weights, together.weights) and alike(gradients.gradients, together.gradients)):
            odd.append(names)
        moved.append((switcher.moved_bytes - halfway, halfway - before))
    apart_bytes, together_bytes = map(sum, zip(*moved, strict=True))
    return odd, disturbed, apart_bytes, together_bytes


def cloned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def alike(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("share", [True, False])
def test_weights_alone_and_gradients_alone_arrive_as_both_together_do(share: bool) -> None:
    """A phase's weights can come early and its gradients leave late: neither may touch the other, or cost more."""
    for odd, disturbed, apart_bytes, together_bytes in run_ranks(4, move_apart, share):
        assert (odd, disturbed) == ([], [])
        assert apart_bytes == together_bytes > 0


def go_round(
    rank: int, world_size: int, precision: Precision, staging_bytes: int, share: bool
) -> list[tuple[str, str, str]]:
    """Every cycle of three strategies; returns those that end with other bytes than they began with."""
    switcher = Switcher(precision, world_size, staging_bytes, CPU, share=share)
    layouts = {strategy: place(strategy) for strategy in STRATEGIES}
    broken = []
    for triple in (t for t in permutations(STRATEGIES, 3) if t[0] == min(t)):
        begun = holding(layouts[triple[0]], rank, precision)
        weights = {name: weight.clone() for name, weight in begun.weights.items()}
        held = begun
        for source, target in pairwise((*triple, triple[0])):
            held = switcher.run(layouts[source], layouts[target], held)
        if any(not torch.equal(weight, held.weights[name]) for name, weight in weights.items()):
            broken.append(triple)
    return broken


@pytest.mark.parametrize(
    ("precision", "staging_bytes", "share"), [(Precision.fp32, 2**20, True), (Precision.bf16, SMALL_STAGING, False)]
)
def test_three_switches_and_back_return_the_same_bytes(precision: Precision, staging_bytes: int, share: bool) -> None:
    """Weights survive any number of switches: rounding happens only where masters are cast."""
    assert run_ranks(4, go_round, precision, staging_bytes, share) == [[]] * 4


def accumulate_ones(rank: int, world_size: int) -> tuple[float, float, bool]:
    """257 backward passes with gradient 1 in bf16, a switch after 100 of them; the sums, and whether storage stayed."""
    first, second = place("dp2"), place("pp2")
    switcher = Switcher(Precision.bf16, 2, 2**20, CPU)
    backbone = Backbone()
    backbone.adopt(holding(first, 0, Precision.bf16, switcher.storage))
    for gradient in backbone.gradients.values():
        gradient.zero_()

    def run(times: int) -> None:
        for _ in range(times):
            torch.stack([weight.sum() for weight in backbone.weights.values()]).sum().backward()

    run(100)
    pointers = {name: weight.data_ptr() for name, weight in backbone.weights.items()}
    backbone.adopt(switcher.run(first, second, backbone.release()))
    run(157)
    gradients = backbone.gradients.values()
    stayed = all(pointers[name] == weight.data_ptr() for name, weight in backbone.weights.items())
    assert all(weight.grad is None for weight in backbone.weights.values())
    return min(float(g.min()) for g in gradients), max(float(g.max()) for g in gradients), stayed


def test_257_ones_are_257_in_bf16_across_a_switch_that_copies_nothing() -> None:
    """In bf16 256 + 1 = 256: partial sums must be fp32, and stay bound to their weights when a layout is entered.

    From dp2 to pp2 every rank keeps the tensors of its stage; the other rank's 100 ones are added to them.
    """
    assert run_ranks(2, accumulate_ones) == [(357.0, 357.0, True)] * 2


def be_late(tell: Tell) -> None:
    rank = dist.get_rank()
    switcher = Switcher(Precision.fp32, RANKS_PER_NODE, 2**20, CPU, timeout_s=2)
    source, target = place("dp4"), place("tp2pp2")
    switcher.prepare(source, target)
    if rank == 1:
        time.sleep(30)
    switcher.run(source, target, holding(source, rank, Precision.fp32))


def test_a_silent_peer_ends_the_switch_with_a_message_that_names_it() -> None:
    """Nobody finds the machine that hangs without the rank, the bytes and the switch."""
    started_s = time.monotonic()
    waits = r"rank \d waiting for (rank 1 to take .* MiB|.* MiB from rank 1), switch dp4 -> tp2pp2, round 1 of \d"
    with pytest.raises(LocalRankError, match=waits):
        run_local(4, be_late, silence_s=2, on_message=print)
    assert time.monotonic() - started_s < 20


def disagree(rank: int, world_size: int) -> None:
    switcher = Switcher(Precision.fp32, RANKS_PER_NODE, 2**20 if rank else SMALL_STAGING, CPU)
    switcher.prepare(place("dp4"), place("tp4"))


def test_ranks_that_would_send_different_rounds_refuse_before_the_first_byte() -> None:
    """Two orders of messages deadlock or, worse, fill a tensor with another one's bytes."""
    with pytest.raises(RankError, match=r"InputError: operations of switch dp4 -> tp4: ranks \[1, 2, 3\]"):
        run_ranks(4, disagree)
