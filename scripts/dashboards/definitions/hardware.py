"""What the machine does: one dashboard for each profile, under one uid, so that a link to it holds everywhere."""

from __future__ import annotations

from scripts.dashboards.definitions.panels import Query, lines, locust, new_dashboard

NO_DATA = "No data"


def machine():
    return [
        lines(
            "CPUs in use",
            "Of all CPUs of the machine, whoever uses them.",
            "percentunit",
            Query("avg_over_time(nv_cpu_utilization[$__rate_interval])", "CPUs"),
            most=1,
            no_value=NO_DATA,
        ),
        lines(
            "Memory of the machine",
            "In use by anybody, and all there is.",
            "bytes",
            Query("nv_cpu_memory_used_bytes", "used"),
            Query("nv_cpu_memory_total_bytes", "all"),
            no_value=NO_DATA,
        ),
        lines(
            "Memory of Triton and its models",
            "Under Docker, of its container and up to its limit; else of the machine.",
            "bytes",
            Query("stack:memory_used:bytes", "used"),
            Query("stack:memory_limit:bytes", "limit"),
            no_value=NO_DATA,
        ),
        *locust("", "No load test (make loadtest, make locust)"),
    ]


def cuda():
    return [
        lines(
            "GPUs in use",
            "The part of the time in which a kernel ran.",
            "percentunit",
            Query("nv_gpu_utilization", "{{gpu_uuid}}"),
            most=1,
            no_value=NO_DATA,
        ),
        lines(
            "Memory of the GPUs",
            "In use, and all there is.",
            "bytes",
            Query("nv_gpu_memory_used_bytes", "used, {{gpu_uuid}}"),
            Query("nv_gpu_memory_total_bytes", "all, {{gpu_uuid}}"),
            no_value=NO_DATA,
        ),
        lines(
            "Power",
            "Drawn, and allowed. At the limit a GPU lowers its clock.",
            "watt",
            Query("nv_gpu_power_usage", "drawn, {{gpu_uuid}}"),
            Query("nv_gpu_power_limit", "limit, {{gpu_uuid}}"),
            no_value=NO_DATA,
        ),
        lines(
            "Energy a request",
            "Of all GPUs, divided by the requests of the model that answers the most.",
            "joule",
            Query(
                "sum(rate(nv_energy_consumption[$__rate_interval]))"
                " / (max(sum by (model) (rate(nv_inference_request_success[$__rate_interval]))) > 0)",
                "energy",
            ),
        ),
        lines(
            "Pinned memory",
            "Host memory from which Triton copies to the GPUs. A full pool makes copies slow.",
            "bytes",
            Query("nv_pinned_memory_pool_used_bytes", "used"),
            Query("nv_pinned_memory_pool_total_bytes", "pool"),
            no_value=NO_DATA,
            width=24,
        ),
    ]


def neuron():
    return [
        lines(
            "NeuronCores in use",
            "The part of the time in which each core computed.",
            "percentunit",
            Query("neuroncore_utilization_ratio", "core {{neuroncore}}"),
            most=1,
            no_value=NO_DATA,
        ),
        lines(
            "Memory of the Neuron runtime",
            "On the devices and on the host.",
            "bytes",
            Query("sum by (memory_location) (neuron_runtime_memory_used_bytes)", "{{memory_location}}"),
            no_value=NO_DATA,
        ),
        lines(
            "Latency of an execution",
            "Of the compiled model on its cores: no queue, no tokenizing.",
            "s",
            Query('max by (percentile) (execution_latency_seconds{percentile=~"p50|p99|p100"})', "{{percentile}}"),
        ),
        lines(
            "Executions/s",
            "By how they ended.",
            "none",
            Query("sum by (status_type) (rate(execution_status_total[$__rate_interval]))", "{{status_type}}"),
        ),
        lines(
            "Errors of the hardware/s",
            "Errors of memory that were or were not corrected.",
            "none",
            Query(
                "sum by (event_type) (rate(hardware_ecc_events_total[$__rate_interval]))",
                "{{event_type}}",
            ),
            no_value=NO_DATA,
            width=24,
        ),
    ]


PROFILES = {"cpu": [machine], "cuda": [cuda, machine], "neuron": [neuron, machine]}


def hardware(profile: str):
    return new_dashboard(
        "triton-hardware",
        "Triton: hardware",
        f"What the machine does, with PROFILE={profile}.",
        "now-15m",
        [panel for panels in PROFILES[profile] for panel in panels()],
    )
