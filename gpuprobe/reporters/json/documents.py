"""JSON documents of ``--json``: one declaration gives what is encoded, and the schema.

A `Document` names the type that it is made from, and the shapes of those types whose objects differ
from their fields (`gpuprobe.model.io.encoder`). `gpuprobe.reporters.json.json_schema` follows the
same shapes and the same types, so that a schema cannot differ from what is encoded.
``Annotated[int, "text"]`` gives a key a description, `Bounds` a least value, `OneOf` and `Matches`
limit a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpuprobe.model.io.document import header
from gpuprobe.model.io.encoder import COMMON, Encoder, InnerObject

if TYPE_CHECKING:
    from gpuprobe.model.io.encoder import Shape, Shapes

T = TypeVar("T")


def _attributes(shape: Shape, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a document, by the attributes of the object that it was made from."""
    found: dict[str, Any] = {}
    for key, source in shape.items():
        if key not in plain:
            continue
        if isinstance(source, InnerObject):
            found |= _attributes(source.shape, plain[key])
        else:
            found[source if isinstance(source, str) else key] = plain[key]
    return found


class Document(Generic[T]):
    """A kind of JSON document, made from values of the type ``kind``.

    ``added`` lists, by minor version, the keys that this version added and that documents of an
    earlier one do not have: of the document, or of an object in it (``RankEstimate.alike``).
    ``bounded``: the schema has the least values of numbers. Objects may have further keys, which
    a later minor version adds.
    """

    def __init__(
        self,
        name: str,
        version: tuple[int, int],
        kind: type[T],
        description: str,
        *,
        title: str = "",
        shapes: Shapes | None = None,
        added: Mapping[str, str] | None = None,
        bounded: bool = True,
    ) -> None:
        self.name = name
        self.version = version
        self.kind = kind
        self.title = title or name.replace(".", " ")
        self.description = description
        self.bounded = bounded
        self.encoder = Encoder({**COMMON, **(shapes or {})})
        self.added = {
            key: version for version, keys in (added or {}).items() for key in keys.split()
        }

    def plain(self, value: T) -> dict[str, Any]:
        """The document as what ``json.dumps`` takes."""
        return {**header(self.name, self.version), **self.encoder.plain(value)}

    def read(self, plain: Mapping[str, Any], where: str = "") -> T:
        """The value that a document was made from: keys that come from its fields are read by the
        codec, and other keys follow from these.

        Raises DataError for data of another shape; ``where`` begins the message.
        """
        from gpuprobe.model.io.codec import from_plain  # 5 ms, and few documents are read

        shape = self.encoder.shape_of(self.kind)
        assert not callable(shape)
        return from_plain(self.kind, _attributes(shape, plain), where)
