# SPDX-License-Identifier: Apache-2.0
"""Collectives on CPU tensors over real processes, against plain torch on all ranks' inputs."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import run_program, torchrun
from random_programs import (
    mutated,
    random_algorithm,
    reduce_chain_in_inputs,
    run_against_contract,
    run_as_computed,
    uneven_sums,
)

from weft.collectives import (
    Algorithm,
    AllToAll,
    Buffer,
    Program,
    VerificationError,
    agreed_selector,
    chunk,
    verify,
)
from weft.collectives.call_runner import transfer
from weft.collectives.calls import Collectives
from weft.collectives.executor import Call, Executor
from weft.collectives.library import build, entries
from weft.collectives.rows import ELEMENTS, REDUCTIONS
from weft.collectives.variants import Variant, build_variant
from weft.collectives.xml_write import to_xml
from weft.errors import Error, PeerLost
from weft.runtime.communicator import Communicator
from weft.testing.ranks import Rank, RankError, run_ranks

DTYPES = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2),
)


AVERAGED = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32)
REDUCING = ("allreduce", "reducescatter", "reduce")


def _values(rank: int, elems: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((torch.arange(elems) * 7 + rank * 5) % 13 % 3 + 1).to(dtype)


def _all_calls(rank: Rank, sizes: list[int]) -> None:
    comm = Collectives(Communicator(rank.group, timeout_s=60).core)
    n, me = rank.size, rank.rank
    for elems in sizes:
        everyone = torch.stack([_values(r, elems * n) for r in range(n)])
        own = everyone[me].clone()
        assert torch.equal(comm.all_reduce(own.clone()), everyone.sum(0)), elems
        assert torch.equal(comm.all_reduce(own, out=torch.empty_like(own)), everyone.sum(0))
        assert torch.equal(comm.all_gather(own), everyone)
        parts = everyone.view(n, n, elems)
        assert torch.equal(comm.reduce_scatter(own.view(n, elems)), parts.sum(0)[me : me + 1])
        assert torch.equal(comm.all_to_all(own.view(n, elems)), parts[:, me])
        assert torch.equal(comm.send_recv(own), everyone[me - 1])
        for root in {0, n - 1}:
            assert torch.equal(comm.broadcast(own.clone(), root), everyone[root])
            reduced = comm.reduce(own.clone(), root)
            assert torch.equal(reduced, everyone.sum(0) if me == root else own)
            gathered = comm.gather(own, root)
            assert (gathered is None) == (me != root) and (
                gathered is None or torch.equal(gathered, everyone)
            )
            out = torch.empty(elems)
            comm.scatter(own if me == root else None, out, root)
            assert torch.equal(out, parts[root, me])
    if n > 1 and me < 2:
        whole = _values(0, 700_001)
        if me == 0:
            comm.send(whole, 1)
        else:
            assert torch.equal(comm.recv(torch.empty(700_001), 0), whole)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_call_agrees_with_torch(ranks: int) -> None:
    run_ranks(ranks, _all_calls, [1, 3, 64, 5003, 90_001], deadline_s=200)


def _types(rank: Rank) -> None:
    comm = Collectives(Communicator(rank.group, timeout_s=60).core)
    for dtype in DTYPES:
        everyone = torch.stack([_values(r, 45, dtype).double() for r in range(rank.size)])
        for op, wanted in (
            ("sum", everyone.sum(0)),
            ("product", everyone.prod(0)),
            ("min", everyone.amin(0)),
            ("max", everyone.amax(0)),
            ("average", everyone.mean(0)),
        ):
            found = comm.all_reduce(_values(rank.rank, 45, dtype), op)
            exact = wanted if dtype.is_floating_point else wanted.trunc()
            assert torch.equal(found.double(), exact.to(dtype).double()), (op, dtype, found, wanted)


def test_every_type_and_reduction() -> None:
    run_ranks(3, _types)


def _averages(rank: Rank, names: list[str]) -> None:
    executor = Executor(Communicator(rank.group, timeout_s=60).core, direct_bytes=4096)
    n = rank.size
    for name, dtype, protocol in itertools.product(names, AVERAGED, ("Simple", "LL", "LL128")):
        algorithm = build(name, n, protocol=protocol).compile() if name else uneven_sums()
        program = executor.load(algorithm)
        contract = algorithm.contract
        assert contract is not None
        for elems in (1, 41, 5003):
            generator = torch.Generator().manual_seed(rank.rank)
            given = torch.randn(len(contract.before(rank.rank)) * elems, generator=generator) * 20
            results = {}
            for op in ("sum", "average"):
                tensor = given.to(dtype, copy=True)
                out = torch.zeros(len(contract.after(rank.rank)) * elems, dtype=dtype)
                part, element = elems * program.per_part, ELEMENTS[str(dtype).removeprefix("torch.")]
                executor.run(program, Call(tensor.data_ptr(), out.data_ptr(), part, element, REDUCTIONS[op]))
                results[op] = tensor if algorithm.inplace and not algorithm.outofplace else out
            total = results["sum"].double()
            wanted = total / n if dtype.is_floating_point else torch.div(total, n, rounding_mode="trunc")
            rounded = wanted.float().to(dtype)
            if rank.rank == contract.root or algorithm.collective != "reduce":
                assert torch.equal(results["average"].view(torch.uint8), rounded.view(torch.uint8)), (
                    *(name, dtype, protocol, elems),
                )


def test_an_average_has_the_bits_of_a_sum_and_a_division() -> None:
    names = [n for n, entry in entries().items() if entry.applies(3) and entry.collective in REDUCING]
    run_ranks(3, _averages, [*names, ""], deadline_s=280)


def _transfers(rank: Rank) -> None:
    executor = Executor(Communicator(rank.group, timeout_s=60).core)
    for elems, instances in ((1, 2), (3, 2), (5003, 2), (400_001, 2), (400_001, 1)):
        if rank.rank == 1:
            continue  # nobody else takes part
        program = executor.load(transfer(3, 0, 2, instances))
        wanted = torch.arange(elems, dtype=torch.int32) * instances
        tensor = wanted.clone() if rank.rank == 0 else torch.zeros_like(wanted)
        executor.run(program, Call(tensor.data_ptr(), tensor.data_ptr(), elems, ELEMENTS["int32"]))
        assert torch.equal(tensor, wanted)


def test_a_message_may_have_several_blocks() -> None:
    run_ranks(3, _transfers)


def _uneven(rank: Rank, seed: int, most: int) -> None:
    comm = Collectives(Communicator(rank.group, timeout_s=60).core)
    generator = random.Random(seed)
    n, me = rank.size, rank.rank
    several = build_variant(Variant("alltoallv_allpairs", "Simple", 4), n, False)
    counts = [[generator.choice([0, 1, generator.randrange(most)]) for _ in range(n)] for _ in range(n)]
    tensor = torch.cat([torch.full((counts[me][q], 3), float(me * 100 + q)) for q in range(n)])
    came = [counts[q][me] for q in range(n)]
    found = comm.all_to_all(tensor, input_splits=counts[me], output_splits=came)
    wanted = torch.cat([torch.full((came[q], 3), float(q * 100 + me)) for q in range(n)])
    assert torch.equal(found, wanted)
    found = comm.all_to_all(tensor, input_splits=counts[me], output_splits=came, algorithm=several)
    assert torch.equal(found, wanted)


def test_all_to_all_with_uneven_splits() -> None:
    for seed, most in ((1, 10), (2, 3000), (3, 300_000)):
        run_ranks(4, _uneven, seed, most)


def _library_programs(ranks: int, names: list[str]) -> list[Algorithm]:
    made = []
    for entry in (entries()[name] for name in names):
        if not entry.applies(ranks):
            continue
        for protocol, instances in (("Simple", 1), ("LL", 1), ("LL128", 2)):
            try:
                made.append(entry.program(ranks, protocol=protocol, instances=instances).compile())
            except Error:
                assert instances == 2
    return made


def _library(rank: Rank, algorithms: list[Algorithm]) -> None:
    executor = Executor(Communicator(rank.group, timeout_s=60).core)
    for algorithm in algorithms:
        for chunk_elems in (1, 40, 20_000):
            run_against_contract(executor, algorithm, rank.rank, chunk_elems)


@pytest.mark.parametrize("ranks", [4, 8])
def test_library_algorithms_do_what_their_contracts_say(ranks: int) -> None:
    big = {"allreduce_a100_allpairs"} if ranks > 4 else set()
    # Compiled before the ranks are forked: once, not by each of them.
    algorithms = _library_programs(ranks, [name for name in entries() if name not in big])
    assert len(algorithms) > len(entries())
    run_ranks(ranks, _library, algorithms, deadline_s=280)


def _is_accepted(algorithm: Algorithm) -> bool:
    try:
        verify(algorithm)
    except VerificationError:
        return False
    return True


def _random_programs(rank: Rank, first: int, count: int) -> int:
    executor = Executor(Communicator(rank.group, timeout_s=60).core, direct_bytes=16)
    survived = 0
    for seed in range(first, first + count):
        algorithm = random_algorithm(seed, rank.size)
        run_against_contract(executor, algorithm, rank.rank, random.Random(seed).choice([1, 5, 300]))
        if not any(True for _ in algorithm.steps()):
            continue
        changed = mutated(algorithm, random.Random(seed))
        if _is_accepted(changed):
            run_against_contract(executor, changed, rank.rank, 7)
            survived += 1
        # What nobody promised anything of computes what the verifier says, in every form that it claims.
        alone = dataclasses.replace(changed, contract=None, inplace=True, outofplace=seed % 2 == 0)
        if _is_accepted(alone):
            run_as_computed(executor, alone, rank.rank, 7)
    return survived


@pytest.mark.parametrize(("ranks", "first"), [(2, 0), (3, 1000), (4, 2000), (5, 3000)])
def test_random_programs_are_exact_and_mutations_rejected_or_still_right(
    ranks: int, first: int, request: pytest.FixtureRequest
) -> None:
    count = (1000 if request.config.getoption("--thorough") else 120) // 4
    survived = run_ranks(ranks, _random_programs, first, count, deadline_s=280)
    assert len(set(survived)) == 1 and 0 < survived[0] < count


def test_every_rank_compiles_the_same_program() -> None:
    """Ranks compile for themselves; nothing may depend on where objects lie in memory."""
    for seed, ranks in ((159, 2), (141, 2), (111, 5)):
        held, made = [], set()
        for turn in range(24):
            held.append([object() for _ in range(97 * turn)])
            made.add(repr(random_algorithm(seed, ranks).ranks))
        assert len(made) == 1, seed


def _missing_rank(rank: Rank) -> str:
    core = Communicator(rank.group, timeout_s=60).core
    Collectives(core, timeout_s=60).all_reduce(torch.ones(8))
    rank.meet()
    story = ""
    if rank.rank != 2:
        comm = Collectives(core, timeout_s=1.0)
        with pytest.raises(PeerLost) as caught:
            comm.all_reduce(torch.ones(8))
        with pytest.raises(PeerLost):
            comm.all_reduce(torch.ones(8))
        story = str(caught.value)
    rank.meet()
    return story


def test_a_rank_that_stays_away_is_named_within_the_deadline() -> None:
    stories = run_ranks(3, _missing_rank)
    for rank in (0, 1):
        assert f"rank {rank}, collective" in stories[rank] and "for rank 2" in stories[rank]


def _built(name: str, inplace: bool) -> Algorithm:
    return entries()[name].program(3, inplace=inplace).compile()


def _bad_arguments(rank: Rank) -> None:
    comm = Collectives(Communicator(rank.group, timeout_s=20).core)
    good = torch.ones(6, 2)
    for act, says in (
        (lambda: comm.all_reduce(torch.ones(2, dtype=torch.complex64)), "tensor.dtype"),
        (lambda: comm.all_reduce(good.t()), "contiguous"),
        (lambda: comm.all_reduce(good, "median"), "op: got median"),
        (lambda: comm.broadcast(good, 9), "root: got 9"),
        (lambda: comm.reduce_scatter(torch.ones(7)), "first dimension"),
        (lambda: comm.all_gather(good, out=torch.ones(3)), "out: got"),
        (lambda: comm.all_to_all(good, input_splits=[1, 2, 4]), "input_splits"),
        (lambda: comm.send(good, rank.rank), "peer"),
        (lambda: comm.broadcast(good, 0.5), "root: got 0.5"),  # type: ignore[arg-type]
        (lambda: comm.all_reduce(torch.ones(3, device="meta")), "device"),
        (lambda: comm.all_reduce(torch.ones(3).to_sparse()), "torch.sparse_coo"),
        (lambda: comm.all_reduce(torch._neg_view(good)), "negated"),
        (lambda: comm.all_reduce(torch.ones(3).bool(), "average"), "torch.bool"),
        # Programs of another collective or root would write past the tensors.
        (lambda: comm.all_reduce(good, algorithm=_built("allgather_allpairs", True)), "for allgather"),
        (lambda: comm.broadcast(good, 1, algorithm=_built("broadcast_flat", True)), "for root 0, not 1"),
    ):
        with pytest.raises(Error) as caught:
            act()
        assert says in str(caught.value)
    assert torch.equal(comm.all_reduce(good), torch.full((6, 2), 3.0))


def test_bad_arguments_are_refused_before_anything_moves() -> None:
    run_ranks(3, _bad_arguments)


def _shared_memory(rank: Rank, elems: int) -> None:
    comm = Collectives(Communicator(rank.group, timeout_s=20).core)
    ranks, me = rank.size, rank.rank
    mine = slice(me * elems, (me + 1) * elems)
    everyone = [torch.arange(float(ranks * elems)) + 1000 * q for q in range(ranks)]

    whole = everyone[me].clone()
    comm.all_gather(whole[mine], out=whole)
    assert torch.equal(whole, torch.cat([t[q * elems : (q + 1) * elems] for q, t in enumerate(everyone)]))
    whole = everyone[me].clone()
    comm.reduce_scatter(whole, out=whole[mine])
    assert torch.equal(whole[mine], sum(everyone)[mine])
    whole = everyone[me].clone()
    comm.all_to_all(whole, out=whole)
    assert torch.equal(whole, torch.cat([t[mine] for t in everyone]))
    splits = [elems] * ranks
    whole = everyone[me].clone()
    comm.all_to_all(whole, out=whole, input_splits=splits, output_splits=splits)
    assert torch.equal(whole, torch.cat([t[mine] for t in everyone]))

    shifted = torch.cat([everyone[me], torch.zeros(3)])
    comm.all_reduce(shifted[:-3], out=shifted[3:])
    assert torch.equal(shifted[3:], sum(everyone))
    shifted = torch.cat([everyone[me], torch.zeros(3)])
    comm.send_recv(shifted[:-3], out=shifted[3:])
    assert torch.equal(shifted[3:], everyone[me - 1])


@pytest.mark.parametrize("elems", [5, 1 << 18])
def test_outputs_may_share_memory_with_inputs(elems: int) -> None:
    run_ranks(3, _shared_memory, elems)


def _bools(rank: Rank) -> None:
    comm = Collectives(Communicator(rank.group, timeout_s=20).core)
    given = torch.tensor([True, rank.rank == 1, False])
    assert comm.all_reduce(given.clone()).sum() == 2  # bytes other than 0 and 1 would count twice
    assert comm.all_reduce(given.clone(), "product").tolist() == [True, False, False]


def test_sums_of_bools_are_bools() -> None:
    run_ranks(3, _bools)


def _made_in_place(comm: Collectives, everyone: torch.Tensor) -> None:
    """Algorithms for in-place calls alone, with tensors that lie apart, in place, and elsewhere in one memory."""
    n, me = comm.size, comm.rank
    own, parts = everyone[me], everyone.view(n, n, -1)
    elems = own.numel() // n

    def built(name: str) -> Algorithm:
        algorithm = build(name, n, inplace=True).compile()
        assert not algorithm.outofplace
        return algorithm

    for name in ("allgather_allpairs", "allgather_ring"):
        assert torch.equal(comm.all_gather(own, algorithm=built(name)), everyone)
        for place in (me, (me + 1) % n):
            whole = torch.zeros_like(everyone)
            whole[place] = own
            assert torch.equal(comm.all_gather(whole[place], out=whole, algorithm=built(name)), everyone)
    for name in ("reducescatter_allpairs", "reducescatter_ring"):
        for place in (None, me, (me + 1) % n):
            given = own.clone().view(n, elems)
            out = torch.zeros(1, elems) if place is None else given[place : place + 1]
            assert torch.equal(
                comm.reduce_scatter(given, out=out, algorithm=built(name))[0], parts.sum(0)[me]
            )
            others = [part for part in range(n) if part != place]
            assert torch.equal(given[others], own.view(n, elems)[others])
    swap = _swap_in_place(n)
    swapped, given = parts[:, me].reshape(-1), own.clone()
    assert torch.equal(comm.all_to_all(given, algorithm=swap), swapped) and torch.equal(given, own)
    assert torch.equal(comm.all_to_all(given, out=given, algorithm=swap), swapped)


def _swap_in_place(ranks: int) -> Algorithm:
    """An all_to_all whose output is its input: all parts are set aside before any is overwritten."""
    pairs = list(itertools.product(range(ranks), repeat=2))
    with Program("swap", AllToAll(ranks, inplace=True)) as program:
        for src, dst in pairs:
            chunk(src, Buffer.input, dst).copy(dst, "aside", src)
        for src, dst in pairs:
            chunk(dst, "aside", src).copy(dst, Buffer.output, src)
    return program.compile()


def _other_forms(rank: Rank) -> None:
    """Algorithms of one's own in calls of the other form, and with roots."""
    comm = Collectives(Communicator(rank.group, timeout_s=20).core)
    everyone = torch.stack([_values(r, 60) for r in range(rank.size)])
    own, total = everyone[rank.rank], everyone.sum(0)

    def built(name: str, inplace: bool = False) -> Algorithm:
        return build(name, rank.size, inplace=inplace).compile()

    apart = built("allreduce_a100_ring")
    assert not apart.inplace
    assert torch.equal(comm.all_reduce(own.clone(), algorithm=apart), total)
    given = own.clone()
    assert torch.equal(comm.all_reduce(given, out=torch.zeros(60), algorithm=apart), total)
    assert torch.equal(comm.broadcast(own.clone(), algorithm=built("broadcast_chain")), everyone[0])
    _made_in_place(comm, everyone)
    for inplace in (True, False):
        chain = reduce_chain_in_inputs(rank.size, inplace)
        found = comm.reduce(own.clone(), algorithm=chain)
        assert torch.equal(found, total if rank.rank == 0 else own)
    assert torch.equal(comm.send_recv(own, algorithm=built("sendrecv")), everyone[rank.rank - 1])
    gathered = comm.gather(own, algorithm=built("gather_flat"))
    assert (gathered is not None and torch.equal(gathered, everyone)) or rank.rank != 0
    out = torch.zeros(20)
    comm.scatter(own if rank.rank == 0 else None, out, algorithm=built("scatter_flat"))
    assert torch.equal(out, everyone[0].view(3, 20)[rank.rank])
    rows, splits = own.view(60, 1), [20] * 3
    swapped = comm.all_to_all(rows, input_splits=splits, algorithm=built("alltoallv_allpairs"))
    assert torch.equal(swapped.view(3, 20), everyone.view(3, 3, 20)[:, rank.rank])
    with pytest.raises(Error, match="which is for alltoall"):
        comm.all_to_all(rows, input_splits=splits, algorithm=built("alltoall_allpairs"))


def test_algorithms_serve_calls_of_the_other_form_and_with_a_root() -> None:
    run_ranks(3, _other_forms)


def _other_files(rank: Rank, folder: str) -> tuple[list[str], str]:
    said: list[str] = []
    agreed_selector.log = SimpleNamespace(warning=lambda text, *args: said.append(text % args))  # type: ignore[assignment]
    given = SimpleNamespace(log="warn", cache_dir="/nowhere", algorithm_dir=folder if rank.rank == 1 else "")
    agreed_selector._core = SimpleNamespace(config=lambda: given)  # type: ignore[assignment]
    comm = Collectives(Communicator(rank.group, timeout_s=20).core)
    ones = torch.ones(1024)
    comm.all_reduce(ones)
    assert torch.equal(ones, torch.full((1024,), 2.0))
    return said, comm.chosen("allreduce", 4096)[0]


def test_ranks_that_read_other_files_choose_alike(tmp_path: Path) -> None:
    ring = entries()["allreduce_a100_ring"].program(2, inplace=True).compile()
    (tmp_path / "ring.xml").write_text(to_xml(ring))
    (said, chosen), (_, other) = run_ranks(2, _other_files, str(tmp_path))
    assert "ranks [1] read other tables" in said[0]
    assert chosen == other and "ring" not in chosen


_REDUCES = """
import torch, weft
comm = weft.Communicator()
print(comm.all_reduce(torch.ones(1024))[0].item())
"""


def test_the_log_says_what_was_chosen_and_why_the_others_lost(tmp_path: Path) -> None:
    (tmp_path / "reduces.py").write_text(_REDUCES)
    more = {"WEFT_LOG": "debug", "WEFT_ALGORITHM_DIR": "/nowhere", "WEFT_CACHE_DIR": str(tmp_path)}
    ran = run_program([*torchrun(2), "reduces.py"], tmp_path, more=more)
    # Ranks share a pipe, and a line's end may come apart from it.
    assert ran.stdout.count("2.0") == 2, ran.stderr
    assert ran.stderr.count("weft warning: algorithms: /nowhere does not exist") == 1  # rank 0 tells
    chosen = re.findall("weft debug: allreduce of 4096 bytes on 2 ranks: .*; lost: (.*)", ran.stderr)
    assert chosen == ["all others: the table has no times of them"] * 2


def test_a_wrong_program_never_reaches_the_executor() -> None:
    with pytest.raises(RankError, match="for 4 ranks"):
        run_ranks(2, _load_for_four)


def _load_for_four(rank: Rank) -> None:
    Executor(Communicator(rank.group).core).load(entries()["allgather_allpairs"].program(4).compile())
