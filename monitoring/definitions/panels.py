"""Parts that all dashboards share: panels, their text without data, the colours of the modes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BarGaugeNamePlacement,
    BarGaugeSizing,
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
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
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from monitoring.drawing.charts import MODE_COLOURS

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
TAG = "triton"
OTHER_MODE_COLOUR = "#8a8a8a"  # "as configured": no comparison runs
NO_TRAFFIC = "No traffic"
# Appended to series of models: an ensemble would be drawn beside its steps, which count the same requests.
OF_STEPS = "unless on (model) model:is_ensemble"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str
    # True: only the value at the end of the range. False: a value for each point of time.
    instant: bool = False

    def build(self, number: int) -> prometheus.Dataquery:
        query = prometheus.Dataquery().expr(self.expr).legend_format(self.legend).ref_id(chr(ord("A") + number))
        query = query.datasource(SOURCE)
        return query.instant() if self.instant else query.range()


def lines(
    title: str, description: str, unit: str, *queries: Query, maximum: float | None = None, **options: Any
) -> Any:
    """Draw lines over time, from zero."""
    legend = common.VizLegendOptions().show_legend(True)
    legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = (
        described(timeseries.Panel(), title, description, unit, queries, **{"width": 12} | options)
        .min(0)
        .line_width(1.5)
        .fill_opacity(8)
        .gradient_mode(GraphGradientMode.NONE)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(False)
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    return panel if maximum is None else panel.max(maximum)


def number(
    title: str, description: str, unit: str, *queries: Query, bad_from: float | None = None, **options: Any
) -> Any:
    """Show the newest value in large type, coloured only if one side of `bad_from` is bad."""
    steps = [Threshold(value=None, color="text" if bad_from is None else "green")]
    if bad_from is not None:
        steps.append(Threshold(value=bad_from, color="red"))
    return (
        described(stat.Panel(), title, description, unit, queries, **{"width": 4, "height": 4} | options)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    )


def names(title: str, description: str, query: Query, **options: Any) -> Any:
    """Show the names of the series instead of their values."""
    panel = number(title, description, "none", query, **{"width": 24, "height": 3} | options)
    return panel.text_mode(BigValueTextMode.NAME)


def bars(title: str, description: str, unit: str, *queries: Query, **options: Any) -> Any:
    """Draw one bar for each series."""
    return (
        described(bargauge.Panel(), title, description, unit, queries, **{"width": 8} | options)
        .min(0)
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .name_placement(BarGaugeNamePlacement.LEFT)
        .sizing(BarGaugeSizing.AUTO)
        .show_unfilled(False)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )


def row(title: str, panels: Iterable[Any], collapsed: bool = False) -> list[Any]:
    """Return the heading of a row and its panels. Grafana keeps those of a collapsed row inside of the heading."""
    heading = dashboard.Row(title).collapsed(collapsed)
    if not collapsed:
        return [heading, *panels]
    for panel in panels:
        heading = heading.with_panel(panel)
    return [heading]


def described(
    panel: Any,
    title: str,
    description: str,
    unit: str,
    queries: Iterable[Query],
    width: int,
    height: int = 8,
    decimals: int | None = None,
    no_value: str = NO_TRAFFIC,
    modes: str | None = None,
) -> Any:
    """Set what all kinds of panels have. `modes` gives each mode its colour: series are named by it and their mode."""
    panel = panel.title(title).description(description).unit(unit).span(width).height(height).datasource(SOURCE)
    panel = panel.no_value(no_value).color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    panel = panel if decimals is None else panel.decimals(decimals)
    for i, query in enumerate(queries):
        panel = panel.with_target(query.build(i))
    if modes is None:
        return panel
    start = f"^{modes}" if modes else "\\b"
    for mode, colour in (MODE_COLOURS | {"as configured": OTHER_MODE_COLOUR}).items():
        value = DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": colour})
        # Without slashes Grafana matches whole names.
        panel = panel.override_by_regexp(f"/{start}{mode}$/", [value])
    return panel


def new_dashboard(
    uid: str, title: str, description: str, since: str, panels: Iterable[Any], variables: Iterable[Any] = ()
) -> dashboard.Dashboard:
    links = dashboard.DashboardLink("Triton").type(DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True)
    new = (
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
        new = new.annotation(
            dashboard.AnnotationQuery()
            .name(f"measured: {mode}")
            .datasource(SOURCE)
            .enable(True)
            .icon_color(colour)
            .expr(f'max by (mode, round) (loadtest_window{{mode="{mode}"}})')
        )
    source = dashboard.DatasourceVariable("source").label("Data source").type("prometheus")
    source = source.current(VariableOption(text="Prometheus", value="prometheus"))
    for chosen in (source, *variables):
        new = new.with_variable(chosen)
    for panel in panels:
        new = new.with_row(panel) if isinstance(panel, dashboard.Row) else new.with_panel(panel)
    return new


def variable(name: str, label: str, query: str, newest: bool = False) -> dashboard.QueryVariable:
    """Let the viewer choose among a label's values: all of them, or one (`newest`: the last in the alphabet)."""
    query_variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .description("The newest, when the dashboard is opened." if newest else "")
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_DESC if newest else VariableSort.ALPHABETICAL_ASC)
    )
    return query_variable if newest else query_variable.include_all(True).all_value(".*").multi(True)
