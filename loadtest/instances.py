"""Check whether the server can run a system in the mode `instances`: one one-thread instance per core."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil
from prometheus_client.parser import text_string_to_metric_families

from loadtest.crowd.crowd import cpu_list
from loadtest.generating import generates
from triton_transformers.settings import Settings
from triton_transformers.triton import Config, metrics_page

# A new process needs this many times the memory that a running one uses.
HEADROOM = 1.1
# Kind of an instance group that does not use the server's cores -> where its instances run.
DEVICES = {"KIND_GPU": "on a GPU", "KIND_MODEL": "where its backend puts them, as on NeuronCores"}


@dataclass(frozen=True)
class Capacity:
    """The server's cores and memory, as the backends report them from where Triton runs."""

    cores: int
    free_bytes: float = float("inf")
    process_bytes: dict[str, float] = field(default_factory=dict)  # of one instance of each model

    @classmethod
    def from_server(cls, settings: Settings) -> Capacity:
        text = metrics_page(settings.url("TRITON_METRICS_PORT"))
        return cls.from_metrics(text, settings.triton_cpus, settings.triton_shm_bytes)

    @classmethod
    def from_metrics(cls, text: str, cpus: str, shared_memory: int) -> Capacity:
        """Read Triton's metrics. A server without backends of this project reports neither cores nor memory."""
        values: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # The gauges of unloaded models are 0.
                if sample.name.startswith("transformers_") and sample.value:
                    values.setdefault(sample.name, {})[sample.labels["model"]] = sample.value
        cores = max(values.get("transformers_cpus", {}).values(), default=0)
        if not cores:
            return cls(len(cpu_list(cpus)) or psutil.cpu_count() or 1)
        used, limit = (max(values[f"transformers_memory_{name}_bytes"].values()) for name in ("used", "limit"))
        # Triton gives each process its shared memory at once, whether or not the process uses it.
        own = values["transformers_process_memory_bytes"]
        return cls(int(cores), limit - used, {model: size + shared_memory for model, size in own.items()})

    def obstacle(self, configs: dict[str, Config]) -> str:
        """Return why the server cannot run these models as one instance for each core, or nothing."""
        if self.cores == 1:
            return "the server has one core, so this would be the mode none again"
        for name, config in configs.items():
            if generates(config):
                return f"each instance of '{name}' would hold the model's weights again"
            if "sequence_batching" in config:
                return f"'{name}' keeps the state of its sequences between requests"
            for group in config.get("instance_group", []):
                if group["kind"] in DEVICES:
                    return f"the instances of '{name}' do not run on the server's cores, but {DEVICES[group['kind']]}"
        needed = self.cores * sum(self.process_bytes.get(name, 0) for name in configs) * HEADROOM
        if needed > self.free_bytes:
            return (
                f"{self.cores} instances of each model need about {needed / 1e9:.1f} GB of memory, and "
                f"{self.free_bytes / 1e9:.1f} GB are free where Triton runs"
            )
        return ""
