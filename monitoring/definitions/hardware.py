"""The dashboard of the hardware: one for each profile, all under one uid, so that links work everywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

from monitoring.definitions.panels import NO_TRAFFIC, Query, new_dashboard
from monitoring.definitions.panels import lines as any_lines

lines = partial(any_lines, no_value="No data")
# Triton's memory is limited to less than the machine has.
LIMITED = "stack:memory_limit:bytes < on () max(nv_cpu_memory_total_bytes)"


def hardware(profile: str) -> Any:
    return new_dashboard(
        "triton-hardware",
        "Triton: hardware",
        f"CPUs, accelerators and memory, with PROFILE={profile}.",
        "now-15m",
        [panel for panels in PROFILES[profile] for panel in panels()],
    )


# fmt: off
def machine() -> list[Any]:
    return [
        lines("CPUs in use", "Share of all CPUs of the machine in use, by any process.", "percentunit",
            Query("avg_over_time(nv_cpu_utilization[$__rate_interval])", "CPUs"), width=8, maximum=1),
        lines("Memory of the machine", "Memory in use by any process, and the machine's total.", "bytes",
            Query("nv_cpu_memory_used_bytes", "used"), Query("nv_cpu_memory_total_bytes", "all"), width=8),
        lines("Memory of Triton and its models",
            "Own memory of the server and of each model's processes, without files that they map. If the container has "
            "a limit, also what counts for it.", "bytes",
            Query("stack:process_memory:bytes", "all"),
            Query("max(transformers_server_memory_bytes > 0)", "tritonserver"),
            Query("max by (model) (sum by (model, instance) (transformers_process_memory_bytes) > 0)", "{{model}}"),
            Query(f"stack:memory_used:bytes and on () {LIMITED}", "in the container"),
            Query(f"stack:memory_limit:bytes and on () {LIMITED}", "limit"), width=8),
    ]


def cuda() -> list[Any]:
    return [
        lines("GPUs in use", "Share of the time in which a kernel ran.", "percentunit",
            Query("nv_gpu_utilization", "{{gpu_uuid}}"), maximum=1),
        lines("Memory of the GPUs", "Memory in use, and the total.", "bytes",
            Query("nv_gpu_memory_used_bytes", "used, {{gpu_uuid}}"),
            Query("nv_gpu_memory_total_bytes", "all, {{gpu_uuid}}")),
        lines("Power", "Power drawn, and the limit. At the limit a GPU lowers its clock.", "watt",
            Query("nv_gpu_power_usage", "drawn, {{gpu_uuid}}"), Query("nv_gpu_power_limit", "limit, {{gpu_uuid}}")),
        lines("Energy per request",
            "Energy of all GPUs, divided by the requests of the model that answers most.", "joule",
            Query("sum(rate(nv_energy_consumption[$__rate_interval]))"
                  " / (max(sum by (model) (rate(nv_inference_request_success[$__rate_interval]))) > 0)", "energy"),
            no_value=NO_TRAFFIC),
        lines("Pinned memory",
            "Host memory from which Triton copies to the GPUs. A full pool makes copies slow.", "bytes",
            Query("nv_pinned_memory_pool_used_bytes", "used"), Query("nv_pinned_memory_pool_total_bytes", "pool"),
            width=24),
    ]


def neuron() -> list[Any]:
    return [
        lines("NeuronCores in use", "Share of the time in which each core computed.", "percentunit",
            Query("neuroncore_utilization_ratio", "core {{neuroncore}}"), maximum=1),
        lines("Memory of the Neuron runtime", "Memory on the devices and on the host.", "bytes",
            Query("sum by (memory_location) (neuron_runtime_memory_used_bytes)", "{{memory_location}}")),
        lines("Latency of an execution",
            "Latency of the compiled model on its cores, without queue and tokenizer.", "s",
            Query('max by (percentile) (execution_latency_seconds{percentile=~"p50|p99|p100"})', "{{percentile}}"),
            no_value=NO_TRAFFIC),
        lines("Executions/s", "Executions by status.", "suffix:executions/s",
            Query("sum by (status_type) (rate(execution_status_total[$__rate_interval]))", "{{status_type}}"),
            no_value=NO_TRAFFIC),
        lines("Errors of the hardware/s", "Corrected and uncorrected memory errors.", "suffix:errors/s",
            Query("sum by (event_type) (rate(hardware_ecc_events_total[$__rate_interval]))", "{{event_type}}"),
            width=24),
    ]


PROFILES = {"cpu": [machine], "cuda": [cuda, machine], "neuron": [neuron, machine]}
