"""On a GPU: what was filled ahead without it is built natively by `upgrade` and `warm`, in workers of their own."""

import pytest

from tests.gpu.test_tuning import command

NAMES = ("matmul", "conv", "sdpa")


@pytest.mark.parametrize("name", NAMES)
def test_upgrading_builds_natively_what_this_device_was_served_otherwise(on_gpu, tmp_path, name):
    (routes,) = on_gpu(f"fill_ahead({name!r}, {str(tmp_path)!r}, both=True)")
    ahead, _ = on_gpu(f"run({name!r}, {str(tmp_path)!r}, mode='require-hit')")
    assert ahead.split()[1] in routes.split()
    report = on_gpu(f"upgrade({str(tmp_path)!r})", timeout=300)
    native, took = on_gpu(f"run({name!r}, {str(tmp_path)!r}, mode='require-hit')")
    print(name, ahead, report, native, took, sep=" | ")
    # Each was run: what it was served by until now, and what it has become.
    assert report == [f"native built {' '.join(sorted(['native', *routes.split()]))}"]
    assert native.startswith("disk native")
    assert on_gpu(f"upgrade({str(tmp_path)!r})", timeout=300) == []  # there is nothing left


@pytest.mark.parametrize("name", NAMES)
def test_an_upgraded_plan_is_the_one_that_is_built_on_the_spot_bit_for_bit(on_gpu, tmp_path, name):
    on_gpu(f"fill_ahead({name!r}, {str(tmp_path / 'ahead')!r}, both=True)")
    on_gpu(f"upgrade({str(tmp_path / 'ahead')!r})", timeout=300)
    upgraded, _ = on_gpu(f"run({name!r}, {str(tmp_path / 'ahead')!r}, mode='require-hit')")
    built, _ = on_gpu(f"run({name!r}, {str(tmp_path / 'fresh')!r})")
    print(name, upgraded, built, sep=" | ")
    assert upgraded.split()[2:4] == built.split()[2:4]


def test_a_bundle_that_lies_under_the_cache_is_upgraded_into_the_cache(on_gpu, tmp_path):
    (routes,) = on_gpu(f"fill_ahead('matmul', {str(tmp_path / 'ahead')!r}, both=True)")
    measured = " ".join(sorted(["native", *routes.split()]))
    layers = {"PLANCACHE_LAYERS": str(tmp_path / "ahead")}
    assert on_gpu(f"upgrade({str(tmp_path / 'node')!r})", timeout=300, **layers) == [f"native built {measured}"]
    assert on_gpu(f"run('matmul', {str(tmp_path / 'node')!r})", **layers)[0].startswith("disk native")


def test_the_command_says_what_each_plan_gains(on_gpu, tmp_path):
    (routes,) = on_gpu(f"fill_ahead('matmul', {str(tmp_path)!r}, both=True)")
    code, out, err = command(tmp_path, "upgrade", "-j", "1")
    print(out)
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    told = {row[2]: list(map(float, row[3:])) for row in rows if row[2:3] in (["replay"], ["deviceless"])}
    assert sorted(told) == sorted(routes.split())
    assert all(before > 0 and native > 0 for before, native, _ in told.values())


def test_warming_without_a_device_builds_natively_for_the_gpu_that_is_here(on_gpu, tmp_path):
    first, second = (on_gpu(f"warm_here({str(tmp_path)!r})", timeout=300) for _ in range(2))
    assert first == ["native built"] * 3
    assert second == ["native found"] * 3
    for name in NAMES:
        assert on_gpu(f"run({name!r}, {str(tmp_path)!r}, mode='require-hit')")[0].startswith("disk native")


def test_dynamic_shapes_are_warmed_natively_with_their_kernels(on_gpu, tmp_path):
    assert on_gpu(f"warm_lengths({str(tmp_path)!r})", timeout=300) == ["native built"] * 3
    outcomes = on_gpu(f"dynamic({str(tmp_path)!r})")  # four lengths, one of which was not warmed
    # 9.19 has a precompiled engine, so that there is no kernel which could serve the length that was not warmed.
    assert [line.split()[0] for line in outcomes] in (["disk"] * 4, ["disk", "disk", "built", "disk"])


def test_rewarming_on_a_gpu_builds_natively_for_it(on_gpu, tmp_path):
    on_gpu(f"fill_ahead('conv', {str(tmp_path)!r}, both=True)")
    assert on_gpu(f"rewarm({str(tmp_path)!r})", timeout=300) == ["native built"]
    assert on_gpu(f"run('conv', {str(tmp_path)!r})")[0].startswith("disk native")
