# SPDX-License-Identifier: Apache-2.0
"""Groups of backend "weft": how torch learns its name, which devices it takes them for, and groups that are split."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from weft_group import join

from weft.testing.ranks import Rank, run_ranks

_GROUP = """
import os, tempfile
path = tempfile.mktemp()
dist.init_process_group("weft", init_method="file://" + path, rank=0, world_size=1)
dist.all_reduce(t := torch.ones(3))
assert (t == 1).all() and dist.get_backend() == "weft"
dist.destroy_process_group()
"""


def _run(program: str, **settings: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("order", ["import weft, torch", "import torch, weft"])
@pytest.mark.parametrize("autoload", ["0", "1"])
def test_the_backend_is_known_after_import_of_weft(order: str, autoload: str) -> None:
    program = f"{order}\nimport torch.distributed as dist\n{_GROUP}"
    _run(program, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)


def test_import_of_weft_imports_neither_torch_nor_the_backend() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'weft._core', 'weft.collectives') if name in sys.modules]"
    assert _run(f"import sys, weft\nprint({heavy})").strip() == "[]"
    assert _run(f"import sys, weft, torch\nprint({heavy})").strip().find("weft") < 0


def test_import_of_torch_alone_knows_the_backend_where_weft_is_installed(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2]
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    metadata = tmp_path / "weft-0.dist-info"  # as an installer writes it
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: weft\nVersion: 0\n")
    lines = [f"[{group}]\n{name} = {value}\n" for group in points for name, value in points[group].items()]
    (metadata / "entry_points.txt").write_text("".join(lines))
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport torch, torch.distributed as dist\n{_GROUP}"
    _run(program)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_torch_takes_groups_for_cpus_alone_where_there_is_no_other_device() -> None:
    import weft  # noqa: F401 - registers the backend

    assert dist.BackendConfig("weft").get_device_backend_map() == {"cpu": "weft"}  # type: ignore[arg-type]
    program = (
        "import torch, torch.distributed as dist, weft\n"
        "torch.cuda.device_count = lambda: 2\n"
        "print(dist.BackendConfig('weft').get_device_backend_map())"
    )
    assert _run(program).strip() == "{'cpu': 'weft', 'cuda': 'weft'}"


def _gather_shards(rank: Rank) -> None:
    from torch.distributed import checkpoint
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    join(rank)
    n, me = rank.size, rank.rank
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{q}/cpu" for q in range(n)])
    shards = sharded_tensor.full(spec, (4, n), fill_value=2.5)
    whole = torch.zeros(4, n) if me == 0 else None
    shards.gather(dst=0, out=whole)
    assert whole is None or (whole == 2.5).all()

    mesh = init_device_mesh("cpu", (n,))
    values = torch.arange(6.0 * n).view(n, 6)
    state = {"weight": distribute_tensor(values, mesh, [Shard(0)]), "shards": shards, "step": 3}
    checkpoint.save(state, checkpoint_id=f"{rank.folder}/saved")
    empty = sharded_tensor.full(spec, (4, n), fill_value=0.0)
    read = {"weight": distribute_tensor(values * 0, mesh, [Shard(0)]), "shards": empty, "step": 0}
    checkpoint.load(read, checkpoint_id=f"{rank.folder}/saved")
    assert torch.equal(read["weight"].full_tensor(), values) and read["step"] == 3
    assert all((shard.tensor == 2.5).all() for shard in empty.local_shards())
    dist.destroy_process_group()


def test_shards_are_gathered_and_saved_on_cpus() -> None:
    run_ranks(2, _gather_shards, with_group=False)


def _split(rank: Rank) -> None:
    join(rank)
    n, me = rank.size, rank.rank
    for turn in range(2):  # the same ranks again, after the first ones are gone
        halves = [[2, 0], [1]]
        group = dist.split_group(split_ranks=halves, timeout=timedelta(seconds=33), group_desc="halves")
        mine = halves[0] if me in halves[0] else halves[1]
        assert isinstance(group, dist.ProcessGroup)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (mine.index(me), len(mine))
        assert dist.get_process_group_ranks(group) == mine and group.group_desc == "halves"
        dist.all_reduce(t := torch.full((5,), float(me + turn)), group=group)
        assert (t == sum(mine) + turn * len(mine)).all()
        objects: list[object] = [None] * len(mine)
        dist.all_gather_object(objects, me, group=group)
        assert objects == mine
        again = dist.split_group(group, [[len(mine) - 1]]) if len(mine) == 2 else None  # of the split one
        if me == mine[-1] and len(mine) == 2:
            assert isinstance(again, dist.ProcessGroup) and dist.get_world_size(again) == 1
        dist.destroy_process_group(group)
    alone = dist.split_group(split_ranks=[[0, 2]])
    assert (alone is dist.GroupMember.NON_GROUP_MEMBER) == (me == 1)
    dist.all_reduce(t := torch.ones(2))  # the parent goes on
    assert (t == n).all()
    dist.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d, "_get_split_source"),
    reason="this version of torch splits groups that are bound to a device alone",
)
def test_groups_are_split() -> None:
    run_ranks(3, _split, with_group=False)


def _reductions_of_functions(rank: Rank) -> None:
    from torch.distributed import _functional_collectives as functional

    join(rank)
    group = dist.group.WORLD
    found = functional.all_reduce(torch.full((3,), rank.rank + 1), "bor", group)
    assert (found == 3).all()
    dist.destroy_process_group()


def test_functional_collectives_reduce_bits() -> None:
    run_ranks(2, _reductions_of_functions, with_group=False)
