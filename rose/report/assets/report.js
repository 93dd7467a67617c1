// Draws every chart of the page from the data block; again when the width, the colour scheme or the medium changes.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const PRINT_PX = { wide: [330, 200], small: [212, 130] };
  const SCREEN_HEIGHT_PX = { wide: 280, small: 170 };
  let plots = [];

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  const decimals = (value) => (Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : Math.abs(value) >= 0.1 ? 2 : 3);

  function words(unit, value) {
    if (value == null) return "–";
    if (unit === "%") return (100 * value).toFixed(value >= 0.095 || value === 0 ? 0 : 1) + " %";
    if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1) + (unit ? " " + unit : "");
    return value.toFixed(decimals(value)) + (unit ? " " + unit : "");
  }

  const tick = (unit, value) => {
    if (value == null) return "";
    if (unit === "%") return +(100 * value).toFixed(1) + " %";
    if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(0);
    return +value.toPrecision(6) + "";
  };

  // Seconds after the run began as min:s, with their sign before it.
  const clock = (at_s) => {
    const whole = Math.abs(Math.round(at_s));
    return (at_s <= -0.5 ? "−" : "") + Math.floor(whole / 60) + ":" + String(whole % 60).padStart(2, "0");
  };
  const at = (chart, x) => (x == null ? "–" : chart.x_time ? clock(x) : x + "");
  const onTop = (chart) => chart.kind === "stack" || chart.kind === "area";
  const shown = (chart) => (onTop(chart) ? [...chart.series].reverse() : chart.series);

  const known = (chart, i) => chart.series.some((series) => series.values[i] != null);

  // Each layer of a stack is drawn from 0 to its cumulated top, the highest first; nothing where nothing is known.
  function stacked(chart) {
    const sums = chart.x.map((x, i) => (known(chart, i) ? 0 : null));
    const add = (value, i) => (sums[i] == null ? null : (sums[i] += value || 0));
    return chart.series.map((series) => series.values.map(add)).reverse();
  }

  function line(u, y, style, dash) {
    const at = Math.round(u.valToPos(y, "y", true)) + 0.5;
    u.ctx.save();
    u.ctx.strokeStyle = style;
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, at);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, at);
    u.ctx.stroke();
    u.ctx.restore();
    return at;
  }

  function drawLimit(u, limit) {
    const style = colour("vermilion");
    const at = line(u, limit.value, style, [5, 4]);
    u.ctx.save();
    u.ctx.fillStyle = style;
    u.ctx.font = 12 * devicePixelRatio + "px system-ui, sans-serif";
    u.ctx.textAlign = "right";
    // On the side of the line that has more room.
    const below = at < u.bbox.top + u.bbox.height / 2;
    u.ctx.textBaseline = below ? "top" : "bottom";
    written(u, limit.label, u.bbox.left + u.bbox.width, at + (below ? 4 : -4) * devicePixelRatio);
    u.ctx.restore();
  }

  // Legible over any curve: with a rim of the paper's colour.
  function written(u, text, x, y) {
    u.ctx.setLineDash([]);
    u.ctx.lineJoin = "round";
    u.ctx.lineWidth = 4 * devicePixelRatio;
    u.ctx.strokeStyle = colour("paper");
    u.ctx.strokeText(text, x, y);
    u.ctx.fillText(text, x, y);
  }

  // Where the run began, if the chart starts before it.
  function drawBeginning(u, chart) {
    if (!chart.x_time || chart.x[0] >= 0) return;
    const x = Math.round(u.valToPos(0, "x", true)) + 0.5;
    u.ctx.save();
    u.ctx.strokeStyle = u.ctx.fillStyle = colour("quiet");
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    u.ctx.beginPath();
    u.ctx.moveTo(x, u.bbox.top);
    u.ctx.lineTo(x, u.bbox.top + u.bbox.height);
    u.ctx.stroke();
    u.ctx.font = 12 * devicePixelRatio + "px system-ui, sans-serif";
    u.ctx.textAlign = "right";
    u.ctx.textBaseline = "top";
    const right = x - 5 * devicePixelRatio;
    if (right - u.ctx.measureText("alone").width >= u.bbox.left) written(u, "alone", right, u.bbox.top);
    u.ctx.restore();
  }

  function drawIntervals(u, chart) {
    for (const series of chart.series.filter((one) => one.low)) {
      u.ctx.save();
      u.ctx.strokeStyle = colour(series.colour);
      u.ctx.lineWidth = 2 * devicePixelRatio;
      u.ctx.beginPath();
      chart.x.forEach((x, i) => {
        if (series.low[i] == null) return;
        const at = u.valToPos(x, "x", true), cap = 4 * devicePixelRatio;
        for (const end of [series.low[i], series.high[i]]) {
          const y = u.valToPos(end, "y", true);
          u.ctx.moveTo(at - cap, y);
          u.ctx.lineTo(at + cap, y);
        }
        u.ctx.moveTo(at, u.valToPos(series.low[i], "y", true));
        u.ctx.lineTo(at, u.valToPos(series.high[i], "y", true));
      });
      u.ctx.stroke();
      u.ctx.restore();
    }
  }

  function yRange(chart) {
    return (u, low, high) => {
      if (chart.scale === "log") {
        const all = [low, high].concat(chart.limit ? [chart.limit.value] : []).filter((value) => value > 0);
        return [10 ** Math.floor(Math.log10(Math.min(...all)) - 0.01), 10 ** Math.ceil(Math.log10(Math.max(...all)) + 0.01)];
      }
      if (chart.top != null) return [0, chart.top];
      const top = Math.max(high || 0, chart.limit ? chart.limit.value : 0) * 1.12 || 1;
      return [Math.min(0, low || 0), chart.unit === "%" ? Math.min(top, 1) : top];
    };
  }

  function powersOfTen(u, axis, low, high) {
    const first = Math.round(Math.log10(low)), count = Math.round(Math.log10(high)) - first + 1;
    return Array.from({ length: count }, (_, i) => 10 ** (first + i));
  }

  function path(chart) {
    if (chart.kind === "stack") return uPlot.paths.bars({ size: [0.7, 44], align: 0 });
    return chart.kind === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined;
  }

  function seriesOptions(chart) {
    return shown(chart).map((series) => {
      const drawn = colour(series.colour);
      const points = series.low != null;
      return {
        label: series.label,
        stroke: drawn,
        width: onTop(chart) || points ? 0 : 2,
        fill: onTop(chart) ? drawn : undefined,
        spanGaps: !points && !chart.x_time,
        paths: path(chart),
        points: { show: !onTop(chart) && !chart.x_time, size: points ? 9 : 5, fill: drawn, stroke: drawn },
        value: (u, raw, index, at) => words(chart.unit, at == null ? null : series.values[at]),
      };
    });
  }

  function options(chart, width, height) {
    const axis = { stroke: colour("quiet"), font: "12px system-ui, sans-serif", grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const single = chart.series.length === 1;
    const last = chart.x.length - 1;
    const latest = Math.max(0, chart.x.findLastIndex((x, i) => known(chart, i)));
    const pad = chart.x_time ? 0 : chart.kind === "stack" ? 0.6 : chart.x.length === 1 ? 1 : 0.25;
    return {
      width,
      height,
      padding: [10, chart.x_time ? 20 : 8, 0, 0],
      scales: {
        x: { time: false, range: () => [chart.x[0] - pad, chart.x[last] + pad] },
        y: { distr: chart.scale === "log" ? 3 : 1, range: yRange(chart) },
      },
      axes: [
        { ...axis, grid: { show: false }, label: chart.x_label, labelSize: 20, labelFont: "12px system-ui, sans-serif", size: 28,
          ...(chart.x_time
            ? { incrs: [1, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600], space: 52, values: (u, values) => values.map(clock) }
            : { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], space: 34 }) },
        { ...axis, size: 54, ...(chart.scale === "log" ? { splits: powersOfTen } : {}), values: (u, values) => values.map((value) => tick(chart.unit, value)), space: 32 },
      ],
      series: [{ label: chart.x_label, value: (u, raw) => at(chart, raw) }, ...seriesOptions(chart)],
      legend: { show: true, live: true, markers: { width: 0, fill: (u, i) => colour(shown(chart)[i - 1].colour) } },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: !single && !onTop(chart) } },
      hooks: {
        draw: [(u) => { drawIntervals(u, chart); drawBeginning(u, chart); if (chart.limit) drawLimit(u, chart.limit); }],
        ready: [(u) => u.setLegend({ idx: latest })],
        setCursor: [(u) => { if (u.cursor.idx == null) u.setLegend({ idx: latest }); }],
      },
    };
  }

  function draw() {
    plots.forEach((plot) => plot.destroy());
    const printing = document.documentElement.classList.contains("printing");
    plots = [...document.querySelectorAll(".plot")].map((place) => {
      const chart = charts[place.dataset.chart];
      const size = chart.wide ? "wide" : "small";
      const [width, height] = printing ? PRINT_PX[size] : [place.clientWidth, SCREEN_HEIGHT_PX[size]];
      const layers = onTop(chart) ? stacked(chart) : chart.series.map((series) => series.values);
      return new uPlot(options(chart, width, height), [chart.x, ...layers], place);
    });
  }

  function print(on) {
    document.documentElement.classList.toggle("printing", on);
    document.querySelectorAll("details").forEach((one) => {
      if (on) { one.dataset.was = one.open ? "open" : ""; one.open = true; } else one.open = one.dataset.was === "open";
    });
    draw();
  }

  let resizing = 0;
  addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(draw); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  draw();
})();
