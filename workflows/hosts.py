"""The hosts of a run: where its training workers run, one model for each provider."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from workflows.explain import FieldError
from workflows.fields import AbsolutePath, Accelerators, Amount, Endpoint, Image, Infra, Strict

Device = Literal["cpu", "cuda"]


class LocalHosts(Strict):
    """Hosts on the worker's own machine: each has its own directory, address, ports and Ray node."""

    owned: ClassVar = True
    """The run creates these hosts, and takes them down."""
    provider: Literal["local"] = Field(description="Hosts on the worker's own machine.", examples=["local"])
    count: int = Field(
        default=2,
        ge=2,
        le=64,
        description="Hosts, each with one training worker. A guarded run is multi-node: at least 2.",
        examples=[2],
    )
    device: Literal["cpu"] = Field(default="cpu", description="What the workers train on.", examples=["cpu"])

    @property
    def require_distinct_hosts(self) -> bool:
        """False: all local hosts are one physical machine."""
        return False

    @property
    def require_distinct_devices(self) -> bool:
        """False: all local ranks share the machine's CPUs."""
        return False


class SkyPilotHosts(Strict):
    """Hosts rented through SkyPilot, taken down when the run ends, however it ends."""

    owned: ClassVar = True
    provider: Literal["skypilot"] = Field(description="Hosts rented through SkyPilot.", examples=["skypilot"])
    count: int = Field(
        default=2,
        ge=2,
        le=64,
        description="Hosts, each with one training worker. A guarded run is multi-node: at least 2.",
        examples=[2],
    )
    infra: Infra = Field(
        description="Where SkyPilot rents: a cloud, cloud/region, k8s/context or slurm/cluster.",
        examples=["nebius", "slurm/training", "k8s/gpu-context"],
    )
    device: Device = Field(default="cuda", description="What the workers train on.", examples=["cuda", "cpu"])
    accelerators: Accelerators | None = Field(
        default=None,
        description="SkyPilot's name of the GPU, with `:1`. Needed for cuda, refused for cpu.",
        examples=["B200:1", "H100:1"],
    )
    image: Image | None = Field(
        default=None,
        description="The hosts' container image, pinned by digest. Absent: the provider's own machine image.",
        examples=["docker:pytorch/pytorch@sha256:db80a41f8428644cebcb3d75b0b62df334ab6c0e75785951eb25f48bfbd42407"],
    )
    accept_licence: bool = Field(
        default=False,
        description="true: you have read and accept the licences of what the image contains (for cuda, "
        "NVIDIA's CUDA EULA). Needed with an image for cuda.",
        examples=[True],
    )
    cpus: Amount | None = Field(
        default=None, description="CPUs of each host; `+` means or more.", examples=["16", "16+"]
    )
    memory: Amount | None = Field(
        default=None, description="Memory of each host in GiB; `+` means or more.", examples=["64", "64+"]
    )
    require_distinct_hosts: bool = Field(
        default=True,
        description="The run fails unless its ranks prove that they ran on different physical hosts.",
        examples=[True],
    )
    require_distinct_devices: bool = Field(
        default=True,
        description="The run fails unless its ranks prove that they used different devices.",
        examples=[True],
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.device == "cuda" and self.accelerators is None:
            raise FieldError("accelerators", 'is needed for device "cuda", for example "B200:1"')
        if self.device == "cpu" and self.accelerators is not None:
            raise FieldError("accelerators", 'is for device "cuda" only: remove it, or set device to "cuda"')
        if self.device == "cuda" and self.image is not None and not self.accept_licence:
            raise FieldError(
                "accept_licence",
                "must be true for a cuda image: first read NVIDIA's EULA, https://docs.nvidia.com/cuda/eula/",
            )
        return self


class ExistingHosts(Strict):
    """A Ray cluster that is already running and stays: the run owns its job, not the hosts."""

    owned: ClassVar = False
    provider: Literal["existing"] = Field(description="A Ray cluster that stays.", examples=["existing"])
    count: int = Field(
        default=2,
        ge=2,
        le=64,
        description="Training workers, each on a host of its own. A guarded run is multi-node: at least 2.",
        examples=[2],
    )
    endpoint: Endpoint = Field(
        description="The cluster's Jobs API: https, or http on loopback (the end of a tunnel).",
        examples=["http://127.0.0.1:8265", "https://ray.example.org:8265"],
    )
    token_file: AbsolutePath = Field(
        description="A file (mode 0600) with the cluster's token, at this path on every worker's machine.",
        examples=["/run/secrets/ray-token"],
    )
    device: Device = Field(default="cpu", description="What the workers train on.", examples=["cpu", "cuda"])
    require_distinct_hosts: bool = Field(
        default=False,
        description="The run fails unless its ranks prove that they ran on different physical hosts.",
        examples=[True],
    )
    require_distinct_devices: bool = Field(
        default=False,
        description="The run fails unless its ranks prove that they used different devices.",
        examples=[True],
    )
