"""The fingerprint, read on a real rank."""

from __future__ import annotations

import importlib.metadata
import os
import platform

from local_ranks import RANK_MEMORY_BYTES

from probes.launch import LocalProber


def test_what_a_rank_reads_of_itself(pair: LocalProber) -> None:
    fingerprint = pair.fingerprint()
    assert fingerprint.hostname == os.uname().nodename
    assert fingerprint.torch == importlib.metadata.version("torch")
    assert fingerprint.libraries["numpy"] == importlib.metadata.version("numpy")
    assert fingerprint.python == platform.python_version()
    assert fingerprint.os == f"Linux {platform.release()}"
    assert (fingerprint.runtime, fingerprint.collective_library) == ("cpu", "gloo")
    assert (fingerprint.device_count, fingerprint.device_memory_bytes) == (2, RANK_MEMORY_BYTES)
    assert fingerprint.cpu_cores == len(os.sched_getaffinity(0))
    assert fingerprint.environment["OMP_NUM_THREADS"] == "1"
    assert fingerprint.environment["torch.num_threads"] == "1"
    assert fingerprint.environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert pair.fingerprint() is fingerprint


def test_only_variables_that_change_speed_and_no_secrets() -> None:
    from probes.fingerprint import speed_environment

    environment = {
        "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0", "TORCH_AUTH_TOKEN": "x",
        "NCCL_SECRET": "x", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "MY_NCCL_ALGO": "x",
    }  # fmt: skip
    assert speed_environment(environment) == {
        "CUDA_VISIBLE_DEVICES": "0", "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2",
    }  # fmt: skip
