//! Secrets, ConfigMaps, lists of them, and the events of a watch, as the API server writes them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use super::json::{Invalid, Next, Reader};
use super::{Kind, Object, Version};
use crate::base::text;

/// `kubectl apply` writes a copy of a Secret's data here, which nothing would wipe.
const COPY_OF_DATA: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// What identifies an object, without the rest of it.
#[derive(Debug, Default)]
pub(super) struct Head<'a> {
    pub(super) name: Cow<'a, str>,
    pub(super) namespace: Cow<'a, str>,
    pub(super) version: Cow<'a, str>,
}

impl<'a> Head<'a> {
    /// Reads an object until everything is known.
    fn read(&mut self, reader: &mut Reader<'a>) -> Result<Next, Invalid> {
        reader.object(|key, reader| match key {
            "metadata" => reader.object(|key, reader| {
                match key {
                    "name" => self.name = reader.text()?,
                    "namespace" => self.namespace = reader.text()?,
                    "resourceVersion" => self.version = reader.text()?,
                    _ => drop(reader.skip()?),
                }
                let is_known =
                    !self.name.is_empty() && !self.namespace.is_empty() && !self.version.is_empty();
                Ok(if is_known { Next::Stop } else { Next::Continue })
            }),
            _ => reader.skip().map(|_| Next::Continue),
        })
    }

    pub(super) fn of_object(text: &'a [u8]) -> Result<Self, Invalid> {
        let mut head = Self::default();
        head.read(&mut Reader::new(text))?;
        Ok(head)
    }
}

/// An event of a watch, of which only the head has been read.
#[derive(Debug)]
pub(super) struct RawEvent<'a> {
    pub(super) kind: Cow<'a, str>,
    pub(super) head: Head<'a>,
    line: &'a [u8],
}

impl<'a> RawEvent<'a> {
    /// Reads no more than the beginning where the type comes before the object, as API servers write it.
    pub(super) fn read(line: &'a [u8]) -> Result<Self, Invalid> {
        let (mut kind, mut head) = (Cow::Borrowed(""), Head::default());
        let mut reader = Reader::new(line);
        let read = reader.object(|key, reader| match key {
            "type" => {
                kind = reader.text()?;
                Ok(Next::Continue)
            }
            // The rest is skipped only where the type is still to come.
            "object" if kind.is_empty() => {
                head = Head::of_object(reader.skip()?)?;
                Ok(Next::Continue)
            }
            "object" => head.read(reader),
            _ => reader.skip().map(|_| Next::Continue),
        })?;
        if read == Next::Continue {
            reader.end()?;
        }
        Ok(Self { kind, head, line })
    }

    /// The bytes of the object.
    pub(super) fn object(&self) -> Result<&'a [u8], Invalid> {
        let (mut object, mut reader) = (None, Reader::new(self.line));
        reader.object(|key, reader| {
            let value = reader.skip()?;
            if key == "object" {
                object = Some(value);
            }
            Ok(Next::Continue)
        })?;
        let invalid = reader.invalid();
        reader.end()?;
        object.ok_or(invalid)
    }
}

/// An object, and its namespace.
struct Read {
    object: Object,
    kind: Box<str>,
    namespace: Box<str>,
    /// The key of a value that is not base64.
    damaged: Option<String>,
}

/// The object in `text`, which must be of this kind and namespace.
pub(super) fn object(text: &[u8], kind: Kind, namespace: &str) -> Result<Object, String> {
    let mut reader = Reader::new(text);
    let read = read(&mut reader, kind).map_err(|error| error.to_string())?;
    reader.end().map_err(|error| error.to_string())?;
    let Read { object, kind: its_kind, namespace: its_namespace, damaged } = read;
    // The objects of a list have no kind.
    if !its_kind.is_empty() && *its_kind != *kind.to_string() {
        return Err(format!("it is a {}, not a {kind}", text::sanitize_for_log(&its_kind)));
    }
    if object.name.is_empty() || object.version.0.is_empty() {
        return Err(format!("it is no {kind}: it has no name or no resourceVersion"));
    }
    if *its_namespace != *namespace {
        let its_namespace = text::sanitize_for_log(&its_namespace);
        return Err(format!("it is an object of the namespace {its_namespace:?}, not of {namespace:?}"));
    }
    match damaged {
        Some(key) => {
            let name = text::sanitize_for_log(&object.name);
            Err(format!("{:?} of the {kind} {name} is not base64", text::sanitize_for_log(&key)))
        }
        None => Ok(object),
    }
}

fn read(reader: &mut Reader<'_>, kind: Kind) -> Result<Read, Invalid> {
    let object = Object {
        name: Box::default(),
        version: Version(Box::default()),
        labels: BTreeMap::new(),
        annotations: BTreeMap::new(),
        data: BTreeMap::new(),
    };
    let mut read = Read { object, kind: Box::default(), namespace: Box::default(), damaged: None };
    reader.object(|key, reader| {
        match key {
            "kind" => read.kind = reader.text()?.into(),
            "metadata" => metadata(reader, &mut read)?,
            "data" | "binaryData" => {
                let is_text = kind == Kind::ConfigMap && key == "data";
                data(reader, is_text, &mut read)?;
            }
            _ => drop(reader.skip()?),
        }
        Ok(Next::Continue)
    })?;
    Ok(read)
}

fn metadata(reader: &mut Reader<'_>, read: &mut Read) -> Result<(), Invalid> {
    reader.object(|key, reader| {
        match key {
            "name" => read.object.name = reader.text()?.into(),
            "namespace" => read.namespace = reader.text()?.into(),
            "resourceVersion" => read.object.version = Version(reader.text()?.into()),
            "labels" => texts(reader, &mut read.object.labels)?,
            "annotations" => texts(reader, &mut read.object.annotations)?,
            _ => drop(reader.skip()?),
        }
        Ok(Next::Continue)
    })?;
    Ok(())
}

fn texts(reader: &mut Reader<'_>, into: &mut BTreeMap<Box<str>, Box<str>>) -> Result<(), Invalid> {
    into.clear();
    reader.object(|key, reader| {
        if key == COPY_OF_DATA {
            reader.skip()?;
        } else {
            into.insert(key.into(), reader.text()?.into());
        }
        Ok(Next::Continue)
    })?;
    Ok(())
}

fn data(reader: &mut Reader<'_>, is_text: bool, read: &mut Read) -> Result<(), Invalid> {
    reader.object(|key, reader| {
        let value = reader.text()?;
        let bytes = if is_text {
            Some(Zeroizing::new(value.into_owned().into_bytes()))
        } else {
            // In one piece: it does not grow, which would leave a copy.
            let mut bytes = Zeroizing::new(Vec::with_capacity(value.len() / 4 * 3 + 3));
            STANDARD.decode_vec(value.as_bytes(), &mut bytes).is_ok().then_some(bytes)
        };
        match bytes {
            Some(bytes) => drop(read.object.data.insert(key.into(), bytes)),
            None => read.damaged = Some(key.to_owned()),
        }
        Ok(Next::Continue)
    })?;
    Ok(())
}

/// The end of a page of a list.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) version: String,
    /// Where the next page begins; empty if there is none.
    pub(super) next: String,
}

/// Adds the objects of a page whose names pass to `objects`.
pub(super) fn page(
    text: &[u8],
    kind: Kind,
    namespace: &str,
    is_wanted: impl Fn(&str) -> bool,
    objects: &mut Vec<Object>,
) -> Result<Page, String> {
    let (mut page, mut failed, mut is_list) = (Page::default(), None, false);
    let mut reader = Reader::new(text);
    let read = reader.object(|key, reader| {
        match key {
            "metadata" => {
                reader.object(|key, reader| {
                    match key {
                        "resourceVersion" => page.version = reader.text()?.into(),
                        "continue" => page.next = reader.text()?.into(),
                        _ => drop(reader.skip()?),
                    }
                    Ok(Next::Continue)
                })?;
            }
            "items" => {
                is_list = true;
                reader.array(|reader| {
                    let item = reader.skip()?;
                    if is_wanted(&Head::of_object(item)?.name) {
                        match object(item, kind, namespace) {
                            Ok(object) => objects.push(object),
                            Err(reason) => failed = Some(reason),
                        }
                    }
                    Ok(())
                })?;
            }
            _ => drop(reader.skip()?),
        }
        Ok(Next::Continue)
    });
    read.and_then(|_| reader.end()).map_err(|error| error.to_string())?;
    match failed {
        Some(reason) => Err(reason),
        None if !is_list || page.version.is_empty() => {
            Err(format!("it is no list of {}: it has no items or no resourceVersion", kind.plural()))
        }
        None => Ok(page),
    }
}
