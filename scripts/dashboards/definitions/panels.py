"""What all dashboards have in common: how a panel looks, what it says without data, the colours of the modes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BarGaugeNamePlacement,
    BarGaugeSizing,
    BigValueColorMode,
    BigValueGraphMode,
    GraphGradientMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
    VariableSort,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="prometheus")
TAG = "triton"
MODE_COLOURS = {"none": "#e0752d", "dynamic": "#3274d9"}
NO_TRAFFIC = "No traffic"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str
    # The value at the end of the range; else one for each point of time.
    instant: bool = False

    def build(self, number: int) -> prometheus.Dataquery:
        query = prometheus.Dataquery().expr(self.expr).legend_format(self.legend).ref_id(chr(ord("A") + number))
        query = query.datasource(SOURCE)
        return query.instant() if self.instant else query.range()


def lines(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 12,
    height: int = 8,
    most: float | None = None,
    no_value: str = NO_TRAFFIC,
) -> timeseries.Panel:
    """Lines over time, from zero."""
    legend = common.VizLegendOptions().show_legend(True)
    legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = (
        _common(timeseries.Panel(), title, description, unit, queries, width, height, no_value)
        .min(0)
        .line_width(1.5)
        .fill_opacity(8)
        .gradient_mode(GraphGradientMode.NONE)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    return panel if most is None else panel.max(most)


def number(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 4,
    height: int = 4,
    decimals: int | None = None,
    bad_from: float | None = None,
    no_value: str = NO_TRAFFIC,
) -> stat.Panel:
    """The newest value, large; coloured only where there is a good and a bad."""
    steps = [Threshold(value=None, color="text" if bad_from is None else "green")]
    if bad_from is not None:
        steps.append(Threshold(value=bad_from, color="red"))
    panel = (
        _common(stat.Panel(), title, description, unit, queries, width, height, no_value)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    )
    return panel if decimals is None else panel.decimals(decimals)


def bars(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    width: int = 8,
    height: int = 8,
    decimals: int | None = None,
    no_value: str = NO_TRAFFIC,
) -> bargauge.Panel:
    """One bar for each series, beside each other."""
    panel = (
        _common(bargauge.Panel(), title, description, unit, queries, width, height, no_value)
        .min(0)
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .name_placement(BarGaugeNamePlacement.LEFT)
        .sizing(BarGaugeSizing.AUTO)
        .show_unfilled(False)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    return panel if decimals is None else panel.decimals(decimals)


def locust(which: str, no_value: str, width: int = 6) -> list[timeseries.Panel]:
    """The load generator itself, in two panels beside each other."""
    return [
        lines(
            "Users",
            "Locust's: each waits for its answer before it asks again.",
            "none",
            Query(f"max(loadtest_users{which})", "users"),
            width=width,
            no_value=no_value,
        ),
        lines(
            "Locust's own core",
            "The part of a core that its busiest process uses. From 90 % on, Locust is measured and not the server.",
            "percentunit",
            Query(f"max(loadtest_cpu_cores{which})", "busiest process"),
            width=width,
            most=1,
            no_value=no_value,
        ),
    ]


def _common(panel, title: str, description: str, unit: str, queries, width: int, height: int, no_value: str):
    panel = panel.title(title).description(description).unit(unit).span(width).height(height).datasource(SOURCE)
    panel = panel.no_value(no_value).color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    for i, query in enumerate(queries):
        panel = panel.with_target(query.build(i))
    return panel


def by_mode(panel):
    """Each mode in its colour: for series whose names end with it."""
    for mode, colour in MODE_COLOURS.items():
        value = DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_regexp(f"/\\b{mode}$/", [value])  # without slashes Grafana matches whole names
    return panel


def new_dashboard(
    uid: str, title: str, description: str, since: str, panels: Iterable, variables: Iterable = ()
) -> dashboard.Dashboard:
    links = dashboard.DashboardLink("Triton").type(DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True)
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags([TAG])
        .timezone("browser")
        .readonly()
        .time(since, "now")
        .refresh("5s")
        .timepicker(dashboard.TimePicker().refresh_intervals(["1s", "5s", "10s", "30s", "1m", "5m"]))
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(links)
    )
    for mode, colour in MODE_COLOURS.items():
        made = made.annotation(
            dashboard.AnnotationQuery()
            .name(f"measured: {mode}")
            .datasource(SOURCE)
            .enable(True)
            .icon_color(colour)
            .expr(f'max by (mode, round) (loadtest_window{{mode="{mode}"}})')
        )
    for each in variables:
        made = made.with_variable(each)
    for panel in panels:
        made = made.with_panel(panel)
    return made


def variable(name: str, label: str, query: str, newest: bool = False) -> dashboard.QueryVariable:
    """A choice among the values that a label has: all of them; `newest`: one, by default the last in the alphabet."""
    made = (
        dashboard.QueryVariable(name)
        .label(label)
        .description("The newest, when the dashboard is opened." if newest else "")
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_DESC if newest else VariableSort.ALPHABETICAL_ASC)
    )
    return made if newest else made.include_all(True).all_value(".*").multi(True)
