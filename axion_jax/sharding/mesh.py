"""Device meshes. Axes: `data` (replicas of the parameters) and `fsdp` (parameters and batch both
split)."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import AxisType


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; -1 takes the devices that the other axis leaves."""

    data: int = 1
    fsdp: int = -1

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp)
        if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
            raise ValueError(
                f"mesh.data={self.data}, mesh.fsdp={self.fsdp}: sizes are at least 1, and at most one may be -1."
            )


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """A mesh over all devices.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    n = jax.device_count()
    sizes = {"data": config.data, "fsdp": config.fsdp}
    known = 1
    for size in sizes.values():
        known *= max(size, 1)
    for axis, size in sizes.items():
        if size == -1:
            if n % known:
                raise ValueError(
                    f"mesh: {known} does not divide the {n} devices, so {axis}=-1 cannot be filled in."
                )
            sizes[axis] = n // known
    total = sizes["data"] * sizes["fsdp"]
    if total != n:
        raise ValueError(
            f"mesh data={sizes['data']} x fsdp={sizes['fsdp']} asks for {total} devices, but there are {n}."
            " Use fsdp=-1 to take what is there."
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
