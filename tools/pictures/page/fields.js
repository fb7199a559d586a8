// Which settings of a field a dashboard may have: Grafana's server registers them, its packages leave that to others.
import { Registry, identityOverrideProcessor, standardTransformers, standardTransformersRegistry } from '@grafana/data';

const STANDARD = ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'thresholds', 'mappings', 'color', 'links'];
const CUSTOM = [
  'drawStyle', 'lineWidth', 'lineStyle', 'lineInterpolation', 'fillOpacity', 'fillBelowTo', 'showPoints', 'pointSize',
  'spanNulls', 'stacking', 'thresholdsStyle', 'axisPlacement', 'axisBorderShow', 'axisSoftMin', 'axisSoftMax', 'scaleDistribution', 'hideFrom',
  'minWidth',
];
const item = (path, isCustom) => ({
  id: isCustom ? `custom.${path}` : path,
  name: path,
  path,
  isCustom,
  process: identityOverrideProcessor,
  shouldApply: () => true,
});

export const SETTINGS = new Registry(() => [
  ...STANDARD.map((path) => item(path, false)),
  ...CUSTOM.map((path) => item(path, true)),
]);

/** What Grafana's panel for time series sets where a dashboard is silent. */
export const LINE_DEFAULTS = {
  drawStyle: 'line',
  lineInterpolation: 'linear',
  pointSize: 5,
  axisPlacement: 'auto',
  axisBorderShow: false,
  scaleDistribution: { type: 'linear' },
  hideFrom: { tooltip: false, viz: false, legend: false },
};

standardTransformersRegistry.setInit(() =>
  ['mergeTransformer', 'filterFieldsByNameTransformer', 'organizeFieldsTransformer'].map((name) => ({
    id: standardTransformers[name].id,
    name,
    transformation: standardTransformers[name],
  }))
);
