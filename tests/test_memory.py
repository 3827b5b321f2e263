"""How much memory is free: that of the machine, and what control groups leave of it."""

import pytest

from leakbound._util.memory import Allowed, free_bytes

MACHINE = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n"
FREE = 8000 * 1024
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
NO_LIMIT = "9223372036854771712"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def second(place, limit, used, cached=0):
    return {
        f"{place}/memory.max": f"{limit}\n",
        f"{place}/memory.current": f"{used}\n",
        f"{place}/memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


def first(place, limit, used, cached=0):
    return {
        f"{place}/memory.limit_in_bytes": f"{limit}\n",
        f"{place}/memory.usage_in_bytes": f"{used}\n",
        f"{place}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("listed", "files", "free"),
    [
        ("0::/\n", {}, FREE),
        ("0::/\n", second(V2, 1000, 400), 600),
        ("0::/\n", second(V2, "max", 400), FREE),
        ("0::/a/b\n", second(f"{V2}/a/b", 1000, 400, cached=100), 700),
        # The narrowest group counts, also one above.
        ("0::/a/b\n", second(f"{V2}/a", 500, 450) | second(f"{V2}/a/b", 1000, 400), 50),
        ("0::/a\n", second(f"{V2}/a", 1000, 1400), 0),
        ("5:cpu:/\n4:memory:/x\n0::/\n", first(f"{V1}/x", 2000, 500, cached=250), 1750),
        ("4:memory:/x\n", first(f"{V1}/x", NO_LIMIT, 500), FREE),
        # In a container of version 1 the path is the machine's, and the top its own group.
        ("4:cpu,memory:/docker/1f\n", first(V1, 3000, 1000), 2000),
        ("4:cpu:/x\n", first(f"{V1}/x", 2000, 500), FREE),
    ],
)
def test_limits_of_control_groups(listed, files, free, tmp_path):
    write(tmp_path, {"proc/meminfo": MACHINE, "proc/self/cgroup": listed, **files})
    assert free_bytes(tmp_path) == free


def test_a_limit_alone_is_known(tmp_path):
    write(tmp_path, {"proc/self/cgroup": "0::/\n", **second(V2, 1000, 400)})
    assert free_bytes(tmp_path) == 600
    assert free_bytes(tmp_path / "nothing") is None


@pytest.mark.parametrize(("free", "room"), [(600, 600), (0, 0), (None, float("inf"))])
def test_the_room_is_what_the_group_leaves(free, room, monkeypatch):
    monkeypatch.setattr("leakbound._util.memory.free_bytes", lambda: free)
    assert Allowed().room == room
