//! The formats in which `/metrics` can be read.

use std::fmt::Write as _;

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.0, which Prometheus asks for.
    OpenMetrics,
    /// Prometheus' older text format, for all other clients.
    Prometheus,
}

impl Format {
    /// The format for a client that sends this `Accept` header.
    pub fn accepted(accept: &str) -> Self {
        let is_asked_for = accept.split(',').any(|range| {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default();
            kind.eq_ignore_ascii_case("application/openmetrics-text") && !parts.any(is_weight_of_zero)
        });
        if is_asked_for { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// Converts `text`, which is in OpenMetrics.
    pub(super) fn of_open_metrics(self, text: String) -> String {
        match self {
            Self::OpenMetrics => text,
            Self::Prometheus => prometheus(&text),
        }
    }
}

/// `q=0` means: anything but this format.
fn is_weight_of_zero(parameter: &str) -> bool {
    parameter.split_once('=').is_some_and(|(name, value)| {
        name.trim().eq_ignore_ascii_case("q") && value.trim().parse().is_ok_and(|weight: f32| weight <= 0.0)
    })
}

/// The formats differ in how they announce a metric: the older one uses the name of its samples, and has no units, no
/// infos and no end mark.
fn prometheus(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let Some(help) = line.strip_prefix("# HELP ") else {
            if !line.starts_with("# ") {
                out.extend([line, "\n"]);
            }
            continue;
        };
        let (name, help) = help.split_once(' ').unwrap_or((help, ""));
        let kind = lines.peek().and_then(|next| next.rsplit(' ').next()).unwrap_or_default();
        let (suffix, kind) = match kind {
            "counter" => ("_total", "counter"),
            "info" => ("_info", "gauge"),
            other => ("", other),
        };
        // Writing to a String does not fail.
        let _ = write!(out, "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_format_announces_metrics_by_the_name_of_their_samples() {
        let new = "# HELP a_build The version\n# TYPE a_build info\na_build_info{version=\"1\"} 1\n\
                   # HELP a_acks Accepted\n# TYPE a_acks counter\na_acks_total{name=\"# HELP x\"} 2\n\
                   # HELP a_end_seconds The end\n# TYPE a_end_seconds gauge\n# UNIT a_end_seconds seconds\n\
                   a_end_seconds 3\n# EOF\n";
        let old = "# HELP a_build_info The version\n# TYPE a_build_info gauge\na_build_info{version=\"1\"} 1\n\
                   # HELP a_acks_total Accepted\n# TYPE a_acks_total counter\na_acks_total{name=\"# HELP x\"} 2\n\
                   # HELP a_end_seconds The end\n# TYPE a_end_seconds gauge\na_end_seconds 3\n";
        assert_eq!(Format::Prometheus.of_open_metrics(new.to_owned()), old);
        assert_eq!(Format::OpenMetrics.of_open_metrics(new.to_owned()), new);
    }

    #[test]
    fn a_client_that_accepts_open_metrics_gets_it() {
        let prometheus =
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let cases = [
            (prometheus, Format::OpenMetrics),
            ("text/plain;q=0.5, Application/OpenMetrics-Text ; version=1.0.0 ; q=0.1", Format::OpenMetrics),
            ("application/openmetrics-text; Q=0.0, */*", Format::Prometheus),
            ("application/openmetrics-text-of-others", Format::Prometheus),
            ("text/plain; profile=\"application/openmetrics-text\"", Format::Prometheus),
            ("text/plain; version=0.0.4", Format::Prometheus),
            ("*/*", Format::Prometheus),
            ("", Format::Prometheus),
        ];
        for (accept, format) in cases {
            assert_eq!(Format::accepted(accept), format, "{accept}");
        }
    }
}
