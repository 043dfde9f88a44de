// Curves of one or several runs: smoothing, logarithm, zoom, PNG and CSV.

import { count, duration, html, number, save, useEffect, useMemo, useRef, useState, useStored, Text } from './core.js';

const { uPlot } = globalThis;

export const COLORS = ['#0f9d8f', '#e0702b', '#4f6df5', '#c2379a', '#8a9a10', '#2b9fe0', '#d9483b', '#7a52d6', '#4e8f3a', '#a9772b'];

/** A moving average that gives the first points their full weight. */
export function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = sum * weight + value * (1 - weight);
    total = total * weight + (1 - weight);
    return sum / total;
  });
}

/** The metrics that any of the points has, the most useful first. Steps may differ in theirs. */
export function metricsOf(series) {
  const names = new Set();
  for (const { points } of series) for (const { metrics } of points) for (const name in metrics) names.add(name);
  const first = ['loss', 'entropy', 'grad_norm', 'update_norm', 'learning_rate', 'tokens', 'seconds'];
  return [...first.filter((name) => names.has(name)), ...[...names].filter((name) => !first.includes(name)).sort()];
}

function columnsOf(one, metric, axis, isLog, weight) {
  const xs = [];
  const ys = [];
  const start = one.points.length ? new Date(one.points[0].time) / 1000 : 0;
  for (const point of one.points) {
    const value = point.metrics[metric];
    xs.push(axis === 'step' ? point.step : new Date(point.time) / 1000 - (axis === 'relative' ? start : 0));
    ys.push(value === undefined || (isLog && value <= 0) ? null : value);
  }
  return weight > 0 ? [xs, ys, smoothed(ys, weight)] : [xs, ys];
}

function dataOf(series, metric, axis, isLog, weight) {
  const tables = series.map((one) => columnsOf(one, metric, axis, isLog, weight)).filter(([xs]) => xs.length);
  if (!tables.length) return [[], ...series.flatMap(() => (weight > 0 ? [[], []] : [[]]))];
  if (tables.length === series.length) return tables.length === 1 ? tables[0] : uPlot.join(tables);
  return uPlot.join(series.map((one) => columnsOf(one, metric, axis, isLog, weight)));
}

const MINUTE = 60;
const HOUR = 60 * MINUTE;
// No parts of a second.
const CLOCK = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((one) => one * MINUTE), ...[1, 2, 3, 6, 12, 24, 48, 96, 192, 720, 1440].map((one) => one * HOUR)];
// Steps are whole numbers.
const WHOLE = [1, 2, 5].flatMap((one) => Array.from({ length: 9 }, (_, power) => one * 10 ** power)).sort((a, b) => a - b);

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** The range of all visible values but the highest and lowest fiftieth, so that a spike does not press the rest flat. */
function rangeOfMost(plot, low, high) {
  // The scale of x still has its range from before a zoom; these are the points that are visible now.
  const [first, last] = plot.series[0].idxs;
  const values = plot.data.slice(1).flatMap((ys) => ys.slice(first, last + 1)).filter(Number.isFinite).sort((a, b) => a - b);
  const cut = Math.floor(values.length / 50);
  return values.length ? [values[cut], values[values.length - 1 - cut]] : [low, high];
}

function optionsOf({ series, axis, isLog, weight, width, height, compact, cutsOutliers, hooks }) {
  const ink = style('--muted');
  const grid = { stroke: style('--line'), width: 1 };
  const lines = series.flatMap((one) => {
    const line = { stroke: one.color, width: compact ? 1.5 : 2, points: { show: (plot) => plot.data[0].length < 3 }, spanGaps: true };
    return weight > 0 ? [{ ...line, alpha: 0.28, width: 1 }, line] : [line];
  });
  const font = '12px system-ui, sans-serif';
  // A small chart has room for few numbers, and needs at least two of each axis.
  const space = compact ? [{ space: 32 }, { space: 18 }] : [{}, {}];
  const range = (plot, ...all) => {
    const [low, high] = rangeOfMost(plot, ...all);
    return isLog ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.1, true);
  };
  return {
    width,
    height,
    legend: { show: false },
    padding: [10, 14, 0, 0],
    cursor: { drag: { x: true, y: false }, points: { size: 7 }, y: !compact },
    scales: { x: { time: axis === 'time' }, y: { distr: isLog ? 3 : 1, range: cutsOutliers ? range : undefined } },
    axes: [
      { ...space[0], stroke: ink, grid, ticks: grid, font, size: axis === 'time' ? 46 : 32, incrs: { step: WHOLE, time: CLOCK }[axis], values: axis === 'relative' ? (_, ticks) => ticks.map((one) => (one >= 3600 ? `${+(one / 3600).toFixed(2)} h` : one >= 60 ? `${+(one / 60).toFixed(1)} min` : `${one} s`)) : undefined },
      { ...space[1], stroke: ink, grid, ticks: grid, font, size: compact ? 54 : 58, values: (_, ticks) => ticks.map((one) => (one === null ? '' : number(one, 3).replace(/\.?0+e/, 'e'))) },
    ],
    series: [{}, ...lines],
    hooks,
  };
}

/** Where a point is the mean over several `steps`, `step` is the last of them. */
function csvOf(series) {
  const metrics = metricsOf(series);
  const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
  const rows = series.flatMap((one) => one.points.map((point) => [
    quoted(one.id), point.step, point.steps, point.time, ...metrics.map((name) => point.metrics[name] ?? ''),
  ].join(',')));
  return [['run', 'step', 'steps', 'time', ...metrics.map(quoted)].join(','), ...rows, ''].join('\n');
}

/** The picture of a chart with its title and the names of its curves. */
function pictureOf(plot, series, title) {
  const ratio = devicePixelRatio || 1;
  const source = plot.ctx.canvas;
  const head = 34 * ratio;
  const line = 20 * ratio;
  const canvas = document.createElement('canvas');
  canvas.width = source.width;
  canvas.height = source.height + head + line * series.length + 8 * ratio;
  const ctx = canvas.getContext('2d');
  ctx.fillStyle = style('--card');
  ctx.fillRect(0, 0, canvas.width, canvas.height);
  ctx.fillStyle = style('--ink');
  ctx.font = `600 ${15 * ratio}px system-ui, sans-serif`;
  ctx.fillText(title, 16 * ratio, 23 * ratio);
  ctx.drawImage(source, 0, head);
  ctx.font = `${12 * ratio}px system-ui, sans-serif`;
  series.forEach((one, index) => {
    const y = head + source.height + line * index + 14 * ratio;
    ctx.fillStyle = one.color;
    ctx.fillRect(16 * ratio, y - 7 * ratio, 14 * ratio, 4 * ratio);
    ctx.fillStyle = style('--ink');
    ctx.fillText(one.label.slice(0, 100), 38 * ratio, y);
  });
  return new Promise((done) => canvas.toBlob(done, 'image/png'));
}

/** A canvas with curves. `series` is a list of {id, label, color, points}. */
function Plot({ series, metric, axis, isLog, weight, height, compact, cutsOutliers = false, onCursor, plotRef, label }) {
  const element = useRef(null);
  const plot = useRef(null);
  const zoomed = useRef(false);
  const [width, setWidth] = useState(0);
  const [theme, setTheme] = useState(0);
  const kind = `${series.map((one) => one.id + one.color).join()} ${axis} ${isLog} ${weight > 0} ${cutsOutliers} ${width} ${theme}`;
  const data = useMemo(() => dataOf(series, metric, axis, isLog, weight), [series, metric, axis, isLog, weight]);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watcher.observe(element.current);
    const changed = () => setTheme((one) => one + 1);
    window.addEventListener('theme', changed);
    return () => {
      watcher.disconnect();
      window.removeEventListener('theme', changed);
    };
  }, []);
  useEffect(() => {
    if (!width) return undefined;
    const hooks = {
      setSelect: [(u) => { if (u.select.width > 0) zoomed.current = true; }],
      setCursor: [(u) => onCursor?.(u.cursor.idx ?? null)],
    };
    const options = optionsOf({ series, axis, isLog, weight, width, height, compact, cutsOutliers, hooks });
    const made = new uPlot(options, data, element.current);
    made.over.addEventListener('dblclick', () => { zoomed.current = false; });
    zoomed.current = false;
    plot.current = made;
    if (plotRef) {
      plotRef.current = {
        plot: made,
        data,
        zoom(factor) {
          const { min, max } = made.scales.x;
          const middle = (min + max) / 2;
          const half = ((max - min) / 2) * factor;
          zoomed.current = true;
          made.setScale('x', { min: middle - half, max: middle + half });
        },
        reset() {
          zoomed.current = false;
          made.setData(made.data, true);
        },
      };
    }
    return () => made.destroy();
  }, [kind]);
  useEffect(() => {
    const { current } = plot;
    if (!current || current.data === data) return;
    // A person who looks at a part keeps it while the run goes on.
    const { min, max } = current.scales.x;
    current.setData(data, !zoomed.current);
    if (zoomed.current) current.setScale('x', { min, max });
    if (plotRef?.current) plotRef.current.data = data;
  }, [data]);
  return html`<div class="plot" ref=${element} role="img" aria-label=${label}></div>`;
}

/** The large chart, with its controls and the values at the cursor. */
export function Chart({ series, title = 'Curves', height = 320, name = 'runs', onRemove }) {
  const [metric, setMetric] = useStored(`chart.metric.${name}`, 'loss');
  const [weight, setWeight] = useStored('chart.smoothing', 0);
  const [isLog, setLog] = useStored('chart.log', false);
  const [cutsOutliers, setCutsOutliers] = useStored('chart.outliers', false);
  const [axis, setAxis] = useStored('chart.axis', 'step');
  const [cursor, setCursor] = useState(null);
  const plot = useRef(null);
  const metrics = useMemo(() => metricsOf(series), [series]);
  const shown = metrics.includes(metric) ? metric : metrics[0] ?? 'loss';
  const points = series.reduce((sum, one) => sum + one.points.length, 0);
  const label = `${shown} of ${series.length === 1 ? series[0].label : `${series.length} runs`}, ${points} points`;
  const columns = weight > 0 ? 2 : 1;
  /** The value at the cursor, or the last one; with smoothing, after the smoothed one. */
  const valueOf = (one, index) => {
    const at = (offset) => plot.current?.data?.[columns * index + 1 + offset]?.[cursor];
    const raw = one.points.map((point) => point.metrics[shown]);
    const value = number(cursor === null ? raw.at(-1) : at(0));
    if (!weight) return value;
    return html`${number(cursor === null ? smoothed(raw, weight).at(-1) : at(1))} <span class="muted">${value}</span>`;
  };
  const x = cursor === null ? undefined : plot.current?.data?.[0]?.[cursor];
  const where = x === undefined ? 'last' : { step: `step ${count(x)}`, relative: duration(x), time: new Date(1000 * x).toLocaleString() }[axis];
  const png = async () => save(`${name}-${shown}.png`, await pictureOf(plot.current.plot, series, `${title}: ${shown}`));
  return html`<section class="card chart" aria-label=${title}>
    <div class="toolbar">
      <label>Metric <select value=${shown} onChange=${(event) => setMetric(event.target.value)}>
        ${metrics.map((one) => html`<option key=${one} value=${one}>${one.slice(0, 80)}</option>`)}
      </select></label>
      <label>X <select value=${axis} onChange=${(event) => setAxis(event.target.value)}>
        <option value="step">step</option><option value="relative">time since start</option><option value="time">clock</option>
      </select></label>
      <label class="range">Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${weight}
        onInput=${(event) => setWeight(Number(event.target.value))} /><output>${weight.toFixed(2)}</output></label>
      <label class="check"><input type="checkbox" checked=${isLog} onChange=${(event) => setLog(event.target.checked)} /> log</label>
      <label class="check" title="The highest and the lowest fiftieth of the values may lie outside of the chart"><input type="checkbox" checked=${cutsOutliers} onChange=${(event) => setCutsOutliers(event.target.checked)} /> no outliers</label>
      <span class="grow"></span>
      <div class="group" role="group" aria-label="Zoom">
        <button onClick=${() => plot.current?.zoom(0.5)} aria-label="Zoom in">+</button>
        <button onClick=${() => plot.current?.zoom(2)} aria-label="Zoom out">−</button>
        <button onClick=${() => plot.current?.reset()}>Reset</button>
      </div>
      <div class="group" role="group" aria-label="Save">
        <button onClick=${png} disabled=${!points}>PNG</button>
        <button onClick=${() => save(`${name}.csv`, csvOf(series), 'text/csv')} disabled=${!points}>CSV</button>
      </div>
    </div>
    <${Plot} series=${series} metric=${shown} axis=${axis} isLog=${isLog} weight=${weight} height=${height} cutsOutliers=${cutsOutliers}
      onCursor=${setCursor} plotRef=${plot} label=${label} />
    <ul class="legend" aria-label="Curves">
      <li class="muted where">${where}</li>
      ${series.map((one, index) => html`<li key=${one.id}>
        <span class="swatch" style=${{ background: one.color }}></span>
        ${one.href ? html`<a href=${one.href}><${Text} max=${60}>${one.label}</${Text}></a>` : html`<${Text} max=${60}>${one.label}</${Text}>`}
        <span class="value">${valueOf(one, index)}</span>
        ${onRemove && html`<button class="quiet" aria-label=${`Remove ${one.label.slice(0, 80)} from the chart`} onClick=${() => onRemove(one.id)}>×</button>`}
      </li>`)}
    </ul>
  </section>`;
}

/** A small chart of one metric. */
export function SmallChart({ series, metric, height = 130 }) {
  const last = series.length === 1 ? series[0].points.at(-1)?.metrics[metric] : undefined;
  return html`<section class="card small-chart" aria-label=${metric}>
    <h3><${Text} max=${40}>${metric}</${Text}>${series.length === 1 && html`<span class="value">${number(last)}</span>`}</h3>
    <${Plot} series=${series} metric=${metric} axis="step" isLog=${false} weight=${0} height=${height} compact
      label=${series.length === 1 ? `${metric}, last ${number(last)}` : `${metric} of ${series.length} runs`} />
  </section>`;
}

/** Curves over the last minutes: `series` as above, with `metrics` of one name each. */
export function TimeChart({ series, metric, height = 160, label }) {
  return html`<${Plot} series=${series} metric=${metric} axis="time" isLog=${false} weight=${0} height=${height} compact label=${label} />`;
}
