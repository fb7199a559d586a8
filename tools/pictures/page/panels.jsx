// One panel as Grafana's own panel of that type composes it of Grafana's components.
import React from 'react';
import {
  applyFieldOverrides,
  getDisplayValueAlignmentFactors,
  getFieldDisplayValues,
  transformDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, Gauge, Table, TimeSeries, VizRepeater } from '@grafana/ui';
import { LINE_DEFAULTS, SETTINGS } from './fields.js';
import { framesOf } from './frames.js';

const unchanged = (text) => text;

/** The frames that a panel shows, after its transformations and with its fields' settings. */
function prepared(panel, results, range, theme) {
  const frames = panel.targets.flatMap((target, place) => framesOf(panel, target, results[place], range));
  let transformed;
  transformDataFrame(panel.transformations, frames, { interpolate: unchanged }).subscribe((found) => (transformed = found));
  const { defaults, overrides } = panel.fieldConfig;
  const steps = defaults.thresholds.steps.map(({ value, color }) => ({ value: value ?? -Infinity, color })); // JSON has no infinity
  const thresholds = { ...defaults.thresholds, steps };
  const custom = panel.type === 'timeseries' ? { ...LINE_DEFAULTS, ...defaults.custom } : defaults.custom;
  return applyFieldOverrides({
    data: transformed,
    fieldConfig: { defaults: { ...defaults, custom, thresholds }, overrides },
    fieldConfigRegistry: SETTINGS,
    replaceVariables: unchanged,
    theme,
    timeZone: 'utc',
  });
}

/** Marks at the times of annotations, on each plot of lines. */
function marks(builder, annotations) {
  builder.addHook('draw', (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const { time, color } of annotations) {
      const x = plot.valToPos(time, 'x', true);
      Object.assign(ctx, { lineWidth: devicePixelRatio, strokeStyle: color });
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  });
  return null;
}

function Lines({ panel, frames, annotations, timeRange, width, height }) {
  return (
    <TimeSeries frames={frames} structureRev={1} timeRange={timeRange} timeZone="utc" width={width} height={height}
      legend={panel.options.legend} options={panel.options}>
      {(builder) => marks(builder, annotations)}
    </TimeSeries>
  );
}

function Repeated({ panel, frames, theme, width, height, renderValue, ...layout }) {
  const getValues = () =>
    getFieldDisplayValues({
      fieldConfig: panel.fieldConfig,
      reduceOptions: panel.options.reduceOptions,
      replaceVariables: unchanged,
      theme,
      data: frames,
      sparkline: false,
      timeZone: 'utc',
    });
  return (
    <VizRepeater getValues={getValues} getAlignmentFactors={getDisplayValueAlignmentFactors} renderValue={renderValue}
      width={width} height={height} source={frames} renderCounter={0} orientation={panel.options.orientation} {...layout} />
  );
}

function Stat(props) {
  const { colorMode, graphMode, text, textMode } = props.panel.options;
  const draw = ({ value, width, height, alignmentFactors, count }) => (
    <BigValue value={value.display} count={count} colorMode={colorMode} graphMode={graphMode} justifyMode="auto"
      text={text} textMode={textMode} alignmentFactors={alignmentFactors} width={width} height={height} theme={props.theme} />
  );
  return <Repeated {...props} renderValue={draw} itemSpacing={3} autoGrid />;
}

function Dial(props) {
  const draw = ({ value, width, height }) => (
    <Gauge value={{ ...value.display, title: '' }} field={value.field} width={width} height={height} theme={props.theme} />
  );
  return <Repeated {...props} renderValue={draw} autoGrid />;
}

function Bars(props) {
  const { displayMode, maxVizHeight, minVizHeight, orientation, text, valueMode } = props.panel.options;
  const draw = ({ value, width, height, alignmentFactors }) => (
    <BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)}
      width={width} height={height} orientation={orientation} theme={props.theme} itemSpacing={10} showUnfilled
      displayMode={displayMode} valueDisplayMode={valueMode} alignmentFactors={alignmentFactors} text={text} />
  );
  return <Repeated {...props} renderValue={draw} itemSpacing={10} {...{ minVizHeight, maxVizHeight }} />;
}

function Rows({ panel, frames, width, height }) {
  return <Table data={frames[0]} width={width} height={height} cellHeight={panel.options.cellHeight} resizable={false} />;
}

const KINDS = { timeseries: Lines, stat: Stat, gauge: Dial, bargauge: Bars, table: Rows };

/** A panel's inside: lines and tables that have nothing to show say so, as in Grafana; other kinds do so themselves. */
export function Panel({ panel, results, range, theme, ...rest }) {
  const frames = prepared(panel, results, range, theme);
  const empty = frames.every((frame) => frame.length === 0);
  if (empty && (panel.type === 'timeseries' || panel.type === 'table')) {
    return <div className="nothing">{panel.fieldConfig.defaults.noValue}</div>;
  }
  const Kind = KINDS[panel.type];
  return <Kind panel={panel} frames={frames} theme={theme} {...rest} />;
}

