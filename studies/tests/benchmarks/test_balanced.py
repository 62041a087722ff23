"""The benchmark of the preset balanced compares systems that train the same documents."""

import pytest

from studies.benchmarks import balanced


def test_every_system_of_a_mesh_has_the_same_gpus_and_global_batch():
    for make in balanced.JOBS.values():
        jobs = [make(system) for system in balanced.SYSTEMS]
        assert len({(job.shape, job.layout.world_size, job.global_batch, job.context_window) for job in jobs}) == 1
    rows = balanced.of_systems("llama3-8b, 128K", steps=2)
    assert [row["system"] for row in rows] == list(balanced.SYSTEMS)
    assert rows[0]["speed"] == 1.0
    assert rows[-1]["token delay"] == 0


def test_an_unknown_section_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert balanced.main(["--sections", "speed"]) == 2
    assert capsys.readouterr().err == (
        "balanced benchmark: error: unknown section 'speed'; choose from meshes, paper, planning\n"
    )
