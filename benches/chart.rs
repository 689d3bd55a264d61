//! Curves as SVG, in colours that are visible on light and on dark pages.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
/// The plot area: left, top, right, bottom.
const FIELD: (f64, f64, f64, f64) = (64.0, 44.0, 744.0, 252.0);
const GREY: &str = "#7d8590";
const COLOURS: [&str; 4] = ["#3b82f6", "#e8590c", "#2f9e44", "#ae3ec9"];

pub(crate) struct Chart<'a> {
    pub title: &'a str,
    /// The label of the horizontal axis, with its unit.
    pub x: &'a str,
    /// The label of the vertical axis, with its unit.
    pub y: &'a str,
    pub scale: Scale,
    /// From when to when the CA is down.
    pub outage: Option<(f64, f64)>,
    pub curves: Vec<Curve>,
}

/// The scale of the vertical axis.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// From 0.
    Linear,
    /// From 1; lower values lie on the axis.
    Logarithmic,
}

pub(crate) struct Curve {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

impl Chart<'_> {
    /// The content of the file.
    pub(crate) fn svg(&self) -> String {
        let (left, top, right, bottom) = FIELD;
        let points = || self.curves.iter().flat_map(|curve| &curve.points);
        let x_from = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
        let x_to = points().map(|point| point.0).fold(x_from, f64::max);
        let most = points().map(|point| point.1).fold(1.0, f64::max);
        let y_ticks: Vec<f64> = match self.scale {
            Scale::Linear => ticks(0.0, most, 5.0, true),
            Scale::Logarithmic => (0..=most.log10().ceil() as i32).map(|power| 10_f64.powi(power)).collect(),
        };
        let y_to = y_ticks.last().copied().unwrap_or(most);
        let x_at = |x: f64| left + (x - x_from) / (x_to - x_from) * (right - left);
        let y_at = |y: f64| {
            let share = match self.scale {
                Scale::Linear => y / y_to,
                Scale::Logarithmic => y.max(1.0).log10() / y_to.log10(),
            };
            bottom - share * (bottom - top)
        };

        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"12\" fill=\"{GREY}\">\n<title>{}</title>\n",
            self.title
        );
        let mut line = |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").unwrap();
        if let Some((from, to)) = self.outage {
            let (from, to) = (x_at(from.max(x_from)), x_at(to.min(x_to)));
            let (width, height) = (to - from, bottom - top);
            line(format_args!(
                "<rect x=\"{from:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height}\" opacity=\"0.18\"/>"
            ));
            let middle = f64::midpoint(from, to);
            line(format_args!(
                "<text x=\"{middle:.1}\" y=\"{}\" text-anchor=\"middle\">no CA</text>",
                top + 14.0
            ));
        }
        for y in &y_ticks {
            let at = y_at(*y);
            line(format_args!("<path d=\"M{left} {at:.1}H{right}\" stroke=\"{GREY}\" opacity=\"0.3\"/>"));
            line(format_args!(
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{y}</text>",
                left - 6.0,
                at + 4.0
            ));
        }
        for x in ticks(x_from, x_to, 10.0, false) {
            let at = x_at(x);
            line(format_args!("<path d=\"M{at:.1} {bottom}v5\" stroke=\"{GREY}\"/>"));
            let below = bottom + 18.0;
            line(format_args!("<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{x}</text>"));
        }
        line(format_args!("<path d=\"M{left} {top}V{bottom}H{right}\" stroke=\"{GREY}\" fill=\"none\"/>"));
        let middle = f64::midpoint(left, right);
        line(format_args!(
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 10.0,
            self.x
        ));
        line(format_args!("<text x=\"4\" y=\"16\">{}</text>", self.y));
        let mut at = right;
        for (curve, colour) in self.curves.iter().zip(COLOURS).rev() {
            line(format_args!(
                "<text x=\"{at}\" y=\"16\" text-anchor=\"end\" fill=\"{colour}\">{}</text>",
                curve.name
            ));
            at -= curve.name.chars().count() as f64 * 6.4 + 18.0;
        }
        for (curve, colour) in self.curves.iter().zip(COLOURS) {
            let points: Vec<_> =
                curve.points.iter().map(|(x, y)| format!("{:.1},{:.1}", x_at(*x), y_at(*y))).collect();
            let points = points.join(" ");
            line(format_args!(
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.3\"/>"
            ));
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// About `count` round numbers from `from` to `to`; `beyond` adds one that is at least `to`.
fn ticks(from: f64, to: f64, count: f64, beyond: bool) -> Vec<f64> {
    let rough = (to - from) / count;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(rough);
    let (first, last) = ((from / step).ceil() as i64, to / step);
    let last = if beyond { last.ceil() } else { last.floor() } as i64;
    // Steps are decimal, but their products may not be.
    (first..=last).map(|tick| (tick as f64 * step * 1e6).round() / 1e6).collect()
}
