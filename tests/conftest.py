"""Settings that must stand before JAX starts: four CPU devices for shard_map, and the CPU by default."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

given = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in given:
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count=4".strip()
