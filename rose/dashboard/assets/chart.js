// One chart: drawn by uPlot from the columns of the feed, on the time axis that all charts share.
import { html, useEffect, useRef } from "/assets/htm-preact.js";
import { feed } from "/assets/feed.js";
import { clock, colour, figure, tick } from "/assets/words.js";

const HEIGHT_PX = 190;
const FONT = "12px system-ui, sans-serif";

// What is to be drawn, in the order in which it is drawn: the tops of areas, the highest first, then lines.
const areas = (chart) => chart.lines.filter((line) => line.style === "area");
const drawn = (chart) => [...areas(chart).reverse(), ...chart.lines.filter((line) => line.style !== "area")];

function columns(chart, fromS) {
  let first = feed.times.findIndex((atS) => atS >= fromS);
  if (first < 0) first = feed.times.length;
  const times = feed.times.slice(first);
  const none = times.map(() => null);
  const column = (line) => feed.values.get(line.series)?.slice(first) ?? none;
  const sums = times.map(() => 0);
  const tops = areas(chart).map((line) => column(line).map((value, i) => (sums[i] += value ?? 0)));
  return [times, ...tops.reverse(), ...chart.lines.filter((line) => line.style !== "area").map(column)];
}

function limits(chart) {
  return (u) => {
    for (const limit of chart.limits) {
      const at = Math.round(u.valToPos(limit.value, "y", true)) + 0.5;
      u.ctx.save();
      u.ctx.strokeStyle = u.ctx.fillStyle = colour("ink");
      u.ctx.lineWidth = 1.5 * devicePixelRatio;
      u.ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
      u.ctx.beginPath();
      u.ctx.moveTo(u.bbox.left, at);
      u.ctx.lineTo(u.bbox.left + u.bbox.width, at);
      u.ctx.stroke();
      u.ctx.font = 12 * devicePixelRatio + "px system-ui, sans-serif";
      u.ctx.textBaseline = "bottom";
      u.ctx.textAlign = "left";
      u.ctx.fillText(limit.label + " " + figure(chart.unit, limit.value), u.bbox.left + 4 * devicePixelRatio, at - 3 * devicePixelRatio);
      u.ctx.restore();
    }
  };
}

function range(chart) {
  return (u, low, high) => {
    if (chart.top != null) return [0, Math.max(chart.top, high || 0)];
    const top = Math.max(high || 0, ...chart.limits.map((limit) => limit.value));
    return [0, top ? top * 1.15 : 1];
  };
}

function options(chart, width, span) {
  const axis = { stroke: colour("quiet"), font: FONT, grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
  const shown = drawn(chart);
  const value = (line) => (u, raw, at, i) => figure(chart.unit, i == null ? null : feed.values.get(line.series)?.[i + feed.times.length - u.data[0].length]);
  // Where nothing is pointed at, the legend tells of now.
  const settle = (u) => { if (u.cursor.idx == null) u.setLegend({ idx: u.data[0].length - 1 }); };
  return {
    width,
    height: HEIGHT_PX,
    padding: [8, 28, 0, 0],
    scales: { x: { time: true, range: () => span.current }, y: { range: range(chart) } },
    axes: [
      { ...axis, grid: { show: false }, size: 28, space: 72, values: (u, splits) => splits.map((atS) => clock(atS, splits[1] - splits[0] < 60)) },
      { ...axis, size: 56, space: 36, values: (u, splits) => splits.map((at) => tick(chart.unit, at)) },
    ],
    series: [
      { label: "time", value: (u, raw) => (raw == null ? "–" : clock(raw, true)) },
      ...shown.map((line) => ({
        label: line.label,
        stroke: colour(line.colour),
        width: line.style === "area" ? 0 : line.style === "faint" ? 1.25 : 2,
        dash: line.style === "faint" ? [4, 3] : undefined,
        fill: line.style === "area" ? colour(line.colour) : undefined,
        paths: line.style === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
        points: { show: false },
        value: value(line),
      })),
    ],
    legend: { live: true, markers: { width: 0, fill: (u, i) => colour(shown[i - 1].colour) } },
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: "rose" }, points: { show: areas(chart).length === 0 } },
    hooks: {
      draw: [limits(chart)],
      setData: [settle],
      setCursor: [settle],
    },
  };
}

export function Chart({ chart, span, scheme }) {
  const place = useRef(), plot = useRef(), held = useRef(span);
  held.current = span;
  useEffect(() => {
    const made = new uPlot(options(chart, place.current.clientWidth, held), columns(chart, span[0]), place.current);
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: place.current.clientWidth, height: HEIGHT_PX }));
    watch.observe(place.current);
    return () => { watch.disconnect(); made.destroy(); };
  }, [JSON.stringify(chart), scheme]);
  useEffect(() => plot.current.setData(columns(chart, span[0])), [feed.atS, span[0]]);
  return html`<figure class="chart">
    <figcaption><h3>${chart.title}</h3><p>${chart.says}${chart.left_out ? ` ${chart.left_out} more are not drawn.` : ""}</p></figcaption>
    <div class="plot" ref=${place} role="img" aria-label=${chart.title + ". " + chart.says}></div>
  </figure>`;
}
