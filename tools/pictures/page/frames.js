// What Prometheus answers, as the data frames that Grafana's Prometheus data source makes of it.
import { FieldType, toDataFrame } from '@grafana/data';

const named = (legend, labels) => legend.replace(/{{\s*(\w+)\s*}}/g, (_, label) => labels[label] ?? '');
const number = (text) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

/** The frames of one query; `range` is `{from, to, step}` in milliseconds. */
export function framesOf(panel, target, result, range) {
  if (target.format === 'table') {
    return [tableOf(panel, target, result)];
  }
  return result.map(({ metric, values, value }) => seriesOf(target, metric, values ?? [value], range));
}

function seriesOf(target, labels, samples, range) {
  const known = new Map(samples.map(([seconds, text]) => [Math.round(seconds * 1000), number(text)]));
  const times = target.range ? grid(range) : [...known.keys()];
  const config = { displayNameFromDS: named(target.legendFormat, labels) };
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: times, config: { interval: range.step } },
      { name: 'Value', type: FieldType.number, labels, values: times.map((time) => known.get(time) ?? null), config },
    ],
  });
}

function grid({ from, to, step }) {
  return Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, place) => from + place * step);
}

function tableOf(panel, target, result) {
  const labels = [...new Set(result.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const name = panel.targets.length > 1 ? `Value #${target.refId}` : 'Value';
  return toDataFrame({
    refId: target.refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: result.map(({ value }) => value[0] * 1000) },
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        values: result.map(({ metric }) => metric[label] ?? ''),
      })),
      { name, type: FieldType.number, values: result.map(({ value }) => number(value[1])) },
    ],
  });
}
