"""Parses Spark's schema DDL without a JVM, because states are declared in slot processes, which have no JVM."""

from __future__ import annotations

import json
import re
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from strandline.errors import SchemaError

_MAX_LENGTH: Final = 1_000_000
_TOKEN: Final = re.compile(r"\s*(?:(`(?:[^`]|``)+`)|('(?:[^'\\]|\\.)*')|([^\W]+)|([<>(),:]))")
_ATOMS: Final[dict[str, type[DataType]]] = {
    "boolean": BooleanType,
    "tinyint": ByteType,
    "byte": ByteType,
    "smallint": ShortType,
    "short": ShortType,
    "int": IntegerType,
    "integer": IntegerType,
    "bigint": LongType,
    "long": LongType,
    "float": FloatType,
    "real": FloatType,
    "double": DoubleType,
    "string": StringType,
    "binary": BinaryType,
    "date": DateType,
    "timestamp": TimestampType,
    "timestamp_ltz": TimestampType,
    "timestamp_ntz": TimestampNTZType,
    "void": NullType,
}


def parse_schema(schema: str | DataType) -> StructType:
    """The struct of `schema`: a `StructType`, its JSON, or a DDL string such as `"n long, s string"`.

    A single type (`"long"`) becomes one column named `value`. Raises `SchemaError` if the text cannot be read.
    """
    if isinstance(schema, StructType):
        return schema
    if isinstance(schema, DataType):
        return StructType([StructField("value", schema)])
    if not isinstance(schema, str):
        raise SchemaError(f"a schema is a DDL string such as 'n long, s string' or a Spark type, not {schema!r}")
    if len(schema) > _MAX_LENGTH:
        raise SchemaError(f"a schema has at most {_MAX_LENGTH:,} characters, not {len(schema):,}: {schema[:100]!r}")
    try:
        return _from_json(schema) if schema.lstrip().startswith("{") else _Parser(schema).schema()
    except RecursionError as error:
        raise SchemaError(f"the types of a schema are nested too deeply: {schema[:100]!r}") from error


def type_text(data_type: DataType) -> str:
    """A type in Spark's notation, without nullability, comments and other metadata. Different types differ in it."""
    match data_type:
        case StructType():
            fields = (f"{_quoted(field.name)}:{type_text(field.dataType)}" for field in data_type.fields)
            return f"struct<{','.join(fields)}>"
        case ArrayType():
            return f"array<{type_text(data_type.elementType)}>"
        case MapType():
            return f"map<{type_text(data_type.keyType)},{type_text(data_type.valueType)}>"
        case _:
            return data_type.simpleString()


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else f"`{name.replace('`', '``')}`"


def _from_json(text: str) -> StructType:
    try:
        value = json.loads(text)
        _check_json_type(value)
        return StructType.fromJson(value)
    except (KeyError, ValueError, TypeError, AttributeError, AssertionError, PySparkException) as error:
        raise SchemaError(f"cannot read the schema {text!r}: {error}") from error


def _check_json_type(type_: object) -> None:
    """Raise `ValueError` for a user-defined type: Spark would import the module that the text names.

    Checkpoints hold schemas as text, and a crafted checkpoint must not run code.
    """
    if isinstance(type_, list):
        for one in type_:
            _check_json_type(one)
    elif isinstance(type_, dict):
        if type_.get("type") == "udt":
            raise ValueError("user-defined types are not supported")
        for name, one in type_.items():
            if name != "metadata":
                _check_json_type(one)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, int]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._error(at)
            self._tokens.append((found.group().strip(), at))
            at = found.end()
        self._at = 0

    def schema(self) -> StructType:
        if not self._tokens:
            raise SchemaError("a schema is empty: name at least one column, such as 'n long'")
        if self._single_type():
            single = self._type()
            self._end()
            return single if isinstance(single, StructType) else StructType([StructField("value", single)])
        fields = [self._field()]
        while self._accept(","):
            fields.append(self._field())
        self._end()
        names = [field.name for field in fields]
        if len(set(names)) < len(names):
            raise SchemaError(f"the schema {self._text!r} names a column twice")
        return StructType(fields)

    def _single_type(self) -> bool:
        following = self._tokens[1][0] if len(self._tokens) > 1 else ""
        return following in ("", "(", "<")

    def _field(self) -> StructField:
        name = self._next()
        if name.startswith("`"):
            name = name[1:-1].replace("``", "`")
        elif not re.fullmatch(r"\w+", name):
            raise self._error(self._tokens[self._at - 1][1])
        self._accept(":")
        data_type = self._type()
        nullable = True
        if self._accept("not"):
            self._expect("null")
            nullable = False
        if self._accept("comment"):
            self._next()
        return StructField(name, data_type, nullable)

    def _type(self) -> DataType:
        start = self._tokens[self._at][1] if self._at < len(self._tokens) else len(self._text)
        word = self._next().lower()
        if word in _ATOMS:
            return _ATOMS[word]()
        if word in ("decimal", "dec", "numeric"):
            numbers = self._numbers()
            if len(numbers) > 2 or (numbers and not 1 <= numbers[0] <= 38) or (numbers[1:] and numbers[1] > numbers[0]):
                raise SchemaError(f"a decimal has 1 to 38 digits, including its scale: {self._text!r}")
            return DecimalType(*numbers)
        if word in ("char", "character", "varchar"):
            self._numbers()
            return StringType()
        if word == "array":
            self._expect("<")
            element = self._type()
            self._expect(">")
            return ArrayType(element)
        if word == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            value = self._type()
            self._expect(">")
            return MapType(key, value)
        if word == "struct":
            self._expect("<")
            fields = [self._field()]
            while self._accept(","):
                fields.append(self._field())
            self._expect(">")
            return StructType(fields)
        if word == "interval":
            for part in ("day", "to", "second"):
                self._expect(part)
            return DayTimeIntervalType()
        raise self._error(start)

    def _numbers(self) -> list[int]:
        numbers: list[int] = []
        if self._accept("("):
            while True:
                word = self._next()
                if not word.isdecimal() or len(word) > 9:
                    raise self._error(self._tokens[self._at - 1][1])
                numbers.append(int(word))
                if not self._accept(","):
                    break
            self._expect(")")
        return numbers

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise self._error(len(self._text))
        self._at += 1
        return self._tokens[self._at - 1][0]

    def _accept(self, word: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at][0].lower() == word:
            self._at += 1
            return True
        return False

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            raise self._error(self._tokens[self._at][1] if self._at < len(self._tokens) else len(self._text))

    def _end(self) -> None:
        if self._at < len(self._tokens):
            raise self._error(self._tokens[self._at][1])

    def _error(self, at: int) -> SchemaError:
        here = self._text[at:].strip()[:30] or "its end"
        return SchemaError(
            f"cannot read the schema {self._text!r} at {here!r}: write 'name type, name type', with Spark's type names"
        )
