// Grafana's gauge is drawn by a plug-in of jQuery's Flot that is in its server and in no package: an arc in its place.
import $ from 'jquery';

const START = 0.8 * Math.PI;
const END = 2.2 * Math.PI;

$.plot = (element, [series], options) => {
  const { gauge, threshold, value } = options.series.gauges;
  const [width, height] = [element.clientWidth, element.clientHeight];
  const canvas = document.createElement('canvas');
  Object.assign(canvas, { width: width * devicePixelRatio, height: height * devicePixelRatio });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  element.replaceChildren(canvas);
  const pen = canvas.getContext('2d');
  pen.scale(devicePixelRatio, devicePixelRatio);
  const radius = Math.min(width / 2, height / 1.8) - gauge.width / 2 - threshold.width - 2;
  const middle = [width / 2, radius + gauge.width / 2 + threshold.width + 2];
  const angle = (at) => START + (END - START) * Math.min(1, Math.max(0, (at - gauge.min) / (gauge.max - gauge.min)));
  const arc = (from, to, thickness, distance, color) => {
    pen.beginPath();
    pen.arc(...middle, distance, from, to);
    Object.assign(pen, { lineWidth: thickness, strokeStyle: color });
    pen.stroke();
  };
  arc(START, END, gauge.width, radius, gauge.background.color);
  arc(START, angle(series.data[0][1]), gauge.width, radius, value.color);
  const outside = radius + gauge.width / 2 + threshold.width / 2 + 1;
  let from = gauge.min;
  for (const bound of threshold.values) {
    arc(angle(from), angle(bound.value), threshold.width, outside, bound.color);
    from = bound.value;
  }
  Object.assign(pen, { fillStyle: value.color, textAlign: 'center', textBaseline: 'middle' });
  pen.font = `${value.font.size}px ${value.font.family}`;
  pen.fillText(value.formatter(), ...middle);
};
