"""Images of records: the fields of a batch against transformers' processor, and every kind of broken image."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.texts.chat import ChatTemplate
from roll_batching.jobs.texts.encode import encode_documents, encode_prompts
from roll_batching.jobs.texts.faults import Faults
from roll_batching.jobs.texts.fit import Fit
from roll_batching.jobs.texts.image_references import ImageError, ImageReference
from roll_batching.jobs.texts.image_tokenizer import ImageProcessor, ImageTokenizer, image_fields, with_images
from roll_batching.jobs.texts.texts import Conversation, Document, Instruction, Prompt, iterate_texts
from tests.support import vision

pytestmark = pytest.mark.models


@pytest.fixture
def folder(tmp_path):
    vision.write_directory(tmp_path / "model", weights=False)
    for seed, size in enumerate([(70, 50), (28, 28), (200, 90)]):
        vision.picture(seed, *size).save(tmp_path / f"{seed}.png")
    return tmp_path


def tokenizer_of(folder, **limits):
    return ImageTokenizer(folder / "model", folder=folder / "model", **limits)


def read(folder, records, tokenizer, kind=Conversation, keys=("messages",), chat=True, **more):
    """Texts of `records`, written as JSON lines."""
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    faults = Faults()
    template = ChatTemplate(tokenizer) if chat else None
    images = image_fields("images", tokenizer)
    texts = list(iterate_texts(kind, file, keys, faults, template=template, images=images, **more))
    Fit(tokenizer=tokenizer, max_length=200, setting="sequence_length", keys=keys).check(texts, faults)
    faults.check()
    return texts


def png(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, options.pop("format", "PNG"), **options)
    return buffer.getvalue()


def normalised(batch):
    """`pixel_values` as transformers' processor gives them."""
    mean, std = (torch.tensor(vision.PREPROCESSOR[name])[:, None, None] for name in ("image_mean", "image_std"))
    pixels = batch["pixel_values"].float().view(-1, 3, 1, 196)
    return ((pixels / 255 - mean) / std).expand(-1, 3, 2, 196).reshape(-1, 1176)


TURNS = [
    {"role": "user", "content": "<image> a <image> b"},
    {"role": "assistant", "content": "#2"},
    {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "image"}]},
    {"role": "assistant", "content": "#3"},
]


def test_fields_equal_those_of_transformers_processor(folder):
    tokenizer = tokenizer_of(folder)
    records = [
        {"messages": TURNS, "images": ["0.png", "1.png", "2.png"]},
        {"messages": [{"role": "user", "content": "1"}, TURNS[1]]},
    ]
    texts = read(folder, records, tokenizer)
    batch = encode_documents(texts, tokenizer, max_length=200)
    parts = [{"type": "image"}, {"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": " b"}]
    processor = vision.processor(folder / "model")
    text = processor.apply_chat_template([{"role": "user", "content": parts}, *TURNS[1:]])
    whole = processor(text=[text], images=[vision.picture(0), vision.picture(1, 28, 28), vision.picture(2, 200, 90)])
    first = batch.select([0])
    assert first["input_ids"].tolist() == whole["input_ids"][0]
    assert first["image_grid_thw"].tolist() == np.asarray(whole["image_grid_thw"]).tolist()
    assert first["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 2], [1, 4, 10]]
    torch.testing.assert_close(normalised(first), torch.tensor(whole["pixel_values"]), atol=2e-6, rtol=0)
    assert first["pixel_values"].dtype is torch.uint8 and first["pixel_values"].shape == (60, 588)
    assert batch["images"].tolist() == [3, 0] and batch["image_patches"].tolist() == [60, 0]
    trained = "".join(tokenizer.decode([token]) for token in first["input_ids"][first["response_mask"]].tolist())
    assert trained == "#2$#3$"


def test_a_prompt_is_rendered_with_its_images_and_a_text_without_a_template(folder):
    tokenizer = tokenizer_of(folder)
    (prompt,) = read(
        folder,
        [{"messages": TURNS[:1], "images": ["0.png", "1.png"], "answer": "3", "tag": "x"}],
        tokenizer,
        Prompt,
        ("messages", "answer"),
    )
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompt.prompt == f"<u>{image} a {image} b$<a>" and prompt.answer == "3"
    assert prompt.line["images"] == [str(folder / "0.png"), str(folder / "1.png")] and prompt.line["tag"] == "x"
    encoded = encode_prompts([prompt], tokenizer, max_length=99)
    assert "images" not in encoded and with_images(encoded, [prompt], tokenizer)["images"].tolist() == [2]
    (document,) = read(
        folder, [{"prompt": "<image>=", "response": "2", "images": "1.png"}], tokenizer, Document,
        ("prompt", "response"), chat=False,
    )  # fmt: skip
    assert document.prompt == f"{image}="
    batch = encode_documents([document], tokenizer, max_length=99)
    assert tokenizer.decode(batch["input_ids"].tolist()) == f"{image}=2$"
    (turn,) = read(
        folder, [{"prompt": "<image>", "query": "how many?", "response": "2", "images": ["0.png"]}], tokenizer,
        Conversation, ("prompt", "response"), chat=False, instruction=Instruction("query"),
    )  # fmt: skip
    assert turn.messages[0]["content"] == [{"type": "image"}, {"type": "text", "text": "\nhow many?"}]


def test_every_form_of_an_image_gives_the_same_pixels(folder):
    import pyarrow
    import pyarrow.parquet as parquet

    tokenizer, raw = tokenizer_of(folder), (folder / "0.png").read_bytes()
    text = base64.b64encode(raw).decode()
    forms = ["0.png", str(folder / "0.png"), f"file://{folder / '0.png'}", f"data:image/png;base64,{text}", text]
    records = [{"messages": TURNS[:2], "images": [form, form]} for form in forms]
    parts = [
        [{"type": "image", "image": forms[3]}, {"type": "image"}],
        [{"type": "image_url", "image_url": {"url": forms[3]}}, {"type": "input_image", "image_url": forms[0]}],
    ]
    records += [
        {"messages": [{"role": "user", "content": content}, TURNS[1]], "images": ["0.png"][: 2 - number]}
        for number, content in zip((1, 2), parts, strict=True)
    ]
    texts = read(folder, records, tokenizer)
    rows = [{"messages": TURNS[:2], "images": [{"bytes": raw, "path": None}, {"bytes": None, "path": "0.png"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "data.parquet")
    faults = Faults()
    texts += iterate_texts(
        Conversation, folder / "data.parquet", ("messages",), faults, images=image_fields("images", tokenizer)
    )
    faults.check()
    batch = encode_documents(texts, tokenizer, max_length=200)
    assert batch["images"].tolist() == [2] * 8
    first, *others = batch.to_lists("pixel_values")
    assert all(torch.equal(first, other) for other in others)
    assert "base64" not in json.dumps([text.line for text in texts])


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK", "exif"])
def test_modes_and_orientation_are_those_of_transformers(folder, mode):
    from PIL import Image, ImageOps
    from transformers import Qwen2VLImageProcessorPil

    image, options = vision.picture(3), {}
    if mode == "exif":
        exif = Image.Exif()
        exif[0x0112] = 6
        options = {"exif": exif, "format": "JPEG"}
    elif mode in ("RGBA", "LA"):
        image.putalpha(vision.picture(4).convert("L"))
        image = image.convert(mode)
    else:
        image = image.convert(mode)
        options = {"format": "TIFF"} if mode == "CMYK" else {}
    raw = png(image, **options)
    pixels, grids = ImageProcessor(folder / "model").encode([ImageReference(data=raw)])
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(raw)))
    other = Qwen2VLImageProcessorPil.from_pretrained(folder / "model")(
        images=[upright], do_rescale=False, do_normalize=False, return_tensors="np"
    )
    assert grids.tolist() == other["image_grid_thw"].tolist()
    assert np.array_equal(
        pixels.astype(np.float32), other["pixel_values"].reshape(-1, 3, 2, 196)[:, :, 1].reshape(-1, 588)
    )
    assert ImageProcessor(folder / "model").num_tokens(ImageReference(data=raw)) == len(pixels) // 4


def test_limits_of_pixels(folder, report):
    image = ImageReference(path=folder / "2.png")
    tokens = {
        limits: ImageProcessor(folder / "model", *limits).num_tokens(image)
        for limits in [(None, None), (None, 784 * 4), (784 * 40, 784 * 99), (784, 784)]
    }
    assert list(tokens.values()) == [10, 2, 50, 1], tokens
    for limits, cause in [((99, 9), "which is impossible"), ((10**9, None), "which is impossible")]:
        with pytest.raises(DataError, match=cause) as caught:
            ImageProcessor(folder / "model", *limits)
        report(str(caught.value))


TURN = [{"role": "user", "content": "<image>"}, TURNS[1]]
BAD = {
    "missing file": ({"images": ["9.png"]}, "9.png does not exist. Give the path"),
    "folder": ({"images": ["model"]}, "is not a regular file"),
    "no image file": ({"images": ["data.jsonl"]}, "is not an image that pillow reads"),
    "truncated": ({"images": ["cut.png"]}, "cut.png cannot be read"),
    "too few": ({"images": []}, "more places of images"),
    "too many": ({"images": ["0.png", "1.png"]}, "1 of its 2 images have no place in the text"),
    "leaves the folder": ({"images": ["../x/0.png"]}, "leaves the data file's folder"),
    "download": ({"images": ["https://host/0.png"]}, "images are not downloaded"),
    "number": ({"images": [3]}, "image 1 of 'images' is of type int"),
    "empty": ({"images": [""]}, "image 1 of 'images' is empty"),
    "bad base64": ({"images": ["data:image/png;base64,?"]}, "not valid base64"),
    "plain data": ({"images": ["data:image/png,x"]}, "without base64"),
    "video": ({"messages": [{"role": "user", "content": [{"type": "video"}]}, TURNS[1]]}, "videos and audio"),
    "part": ({"messages": [{"role": "user", "content": ["x"]}, TURNS[1]]}, "a part of a message is str"),
    "own token": (
        {"images": ["0.png"], "messages": [{"role": "user", "content": "<image><|image_pad|>"}, TURNS[1]]},
        "2 image tokens for 1 images",
    ),
    "own token in a text": (
        {"messages": [{"role": "user", "content": "<|image_pad|>"}, TURNS[1]]}, "1 image tokens for 0 images",
    ),
    "own token of a video": (
        {"messages": [{"role": "user", "content": "<|video_pad|>"}, TURNS[1]]},
        "holds <|video_pad|>, the token of videos",
    ),
    "other keys": ({"images": [{"image": "0.png"}]}, "is an object with 'image', and none of bytes, url, path"),
    "long and thin": ({"images": ["thin.png"]}, "aspect ratio"),
    "deep pixels": ({"images": ["deep.png"]}, "has pixels of mode 'I;16'"),
    "animation": ({"images": ["film.gif"]}, "has 2 frames"),
    "bomb": ({"images": ["bomb.png"]}, "has too many pixels"),
}  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize("case", BAD)
def test_a_broken_image_is_named_with_its_line(folder, case, report, monkeypatch):
    from PIL import Image

    (folder / "cut.png").write_bytes((folder / "2.png").read_bytes()[:9000])
    Image.new("RGB", (2100, 10)).save(folder / "thin.png")
    Image.new("I;16", (50, 50)).save(folder / "deep.png")
    vision.picture(0).save(folder / "film.gif", save_all=True, append_images=[vision.picture(1)])
    if case == "bomb":
        Image.new("1", (30, 30)).save(folder / "bomb.png")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 800)
    record, message = BAD[case]
    good = {"messages": TURNS[:2], "images": ["1.png", "1.png"]}
    with pytest.raises(DataError) as caught:
        read(folder, [good, {"messages": TURN} | record], tokenizer_of(folder))
    assert f"{folder / 'data.jsonl'}:2: " in str(caught.value) and message in str(caught.value), caught.value
    report(str(caught.value))


@pytest.mark.bad_input
def test_an_image_that_vanishes_or_shrinks_after_the_check(folder, report):
    tokenizer = tokenizer_of(folder)
    texts = read(folder, [{"messages": TURN, "images": ["2.png"]}], tokenizer)
    (folder / "2.png").write_bytes((folder / "2.png").read_bytes()[:9000])
    with pytest.raises(DataError, match=r"data.jsonl:1: .*2.png cannot be read \(") as caught:
        encode_documents(texts, tokenizer, max_length=200)
    report(str(caught.value))
    (folder / "2.png").unlink()
    with pytest.raises(DataError, match=r"data.jsonl:1: the image .*2.png does not exist"):
        encode_documents(texts, tokenizer, max_length=200)


@pytest.mark.bad_input
def test_directories_that_do_not_fit(folder, report):
    file, config = folder / "model" / "preprocessor_config.json", folder / "model" / "config.json"
    good, fields = file.read_text(), json.loads(config.read_text())
    for text, cause in [
        (good.replace("Qwen2VL", "CLIP"), "is CLIPImageProcessor; images are read for Qwen2VL"),
        (good.replace("{", '{"do_resize": false, ', 1), "turns do_resize or do_convert_rgb off"),
        ("{", "no image processor could be loaded"),
    ]:
        file.write_text(text)
        with pytest.raises(DataError, match=cause) as caught:
            tokenizer_of(folder)
        report(str(caught.value))
    file.unlink()
    with pytest.raises(DataError, match="no image processor could be loaded"):
        tokenizer_of(folder)
    file.write_text(good)
    config.write_text(json.dumps(fields | {"image_token_id": 3}))
    with pytest.raises(DataError, match="it belongs to another model"):
        tokenizer_of(folder)
    config.write_text(json.dumps({name: value for name, value in fields.items() if name != "image_token_id"}))
    with pytest.raises(DataError, match="has no image_token_id"):
        tokenizer_of(folder)
    config.write_text(json.dumps(fields))
    vision.write_tokenizer(folder / "model", vision.TEMPLATE.replace("<|image_pad|>", ""))
    with pytest.raises(DataError, match="0 image tokens for 1 images.* the chat template must write one"):
        read(folder, [{"messages": TURN, "images": ["0.png"]}], tokenizer_of(folder))


@pytest.mark.bad_input
def test_image_parts_without_the_key_of_images(folder):
    faults = Faults()
    (folder / "data.jsonl").write_text(json.dumps({"messages": TURNS[2:]}) + "\n")
    assert not list(iterate_texts(Conversation, folder / "data.jsonl", ("messages",), faults))
    with pytest.raises(DataError, match="message 1 of 'messages' has an image. .* set actor_train.data_args.images"):
        faults.check()


def test_texts_with_images_have_another_fingerprint(folder):
    from roll_batching.jobs.texts.texts import Fingerprint

    def fingerprint(*images):
        digest = Fingerprint()
        digest.add(Prompt("a", "b", images=images))
        return digest.value()

    one, two = (ImageReference(path=folder / f"{number}.png") for number in (0, 1))
    assert len({fingerprint(), fingerprint(one), fingerprint(two), fingerprint(one, two), fingerprint(two, one)}) == 5
    assert ImageReference(data=b"x").digest() != ImageReference(data=b"y").digest()
    with pytest.raises(ImageError, match="cannot be read|not an image"):
        ImageProcessor(folder / "model").num_tokens(ImageReference(data=b"x"))


def test_an_image_in_a_part_prefers_its_bytes_and_is_named_for_rewards(folder):
    data = base64.b64encode((folder / "0.png").read_bytes()).decode()
    parts = [{"type": "image", "path": "no.png", "bytes": data}, {"type": "image", "image": "1.png"}]
    (text,) = read(folder, [{"messages": [{"role": "user", "content": parts}, TURNS[1]]}], tokenizer_of(folder))
    assert [image.path for image in text.images] == [None, folder / "1.png"]
    assert text.line["images"][1] == str(folder / "1.png") and len(text.line["images"]) == 2


@pytest.mark.bad_input
def test_a_response_has_no_place_of_an_image(folder):
    record = {"prompt": "<image> a", "response": "b <image>", "images": ["0.png"]}
    with pytest.raises(DataError, match="data.jsonl:1: prompt: its response holds <image>"):
        read(folder, [record], tokenizer_of(folder), Document, ("prompt", "response"), chat=False)


@pytest.mark.bad_input
@pytest.mark.parametrize("text", ["x" * 100_000, "a\0.png", "a\n\x1b[31m.png", "\ud800.png", "n" * 300, "DATA:,"])
def test_a_strange_path_is_named_in_one_short_line(folder, text, report):
    with pytest.raises(DataError) as caught:
        read(folder, [{"messages": TURN, "images": [text]}], tokenizer_of(folder))
    message = str(caught.value)
    assert message.isprintable() and len(message) < 800 and ":1: " in message
    assert ImageReference(path=folder / text).digest()  # computed before the fault is reported
    report(message)


def broken_files():
    """Files that make pillow raise other exceptions than OSError, by the exception."""
    picture = vision.picture(0)
    portable = png(picture, format="PPM").replace(b"255", b"2x5", 1)
    surface = bytearray(png(picture, format="DDS"))
    surface[80:84] = bytes(4)
    header = bytearray(png(picture))
    header[11] = 9  # IHDR of 9 bytes
    return {"ValueError": portable, "NotImplementedError": bytes(surface), "IHDR": bytes(header)}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", broken_files())
def test_every_exception_of_pillow_names_the_line(folder, case, report):
    (folder / "broken").write_bytes(broken_files()[case])
    with pytest.raises(DataError, match=r"data.jsonl:1: .*broken cannot be read \(") as caught:
        read(folder, [{"messages": TURN, "images": ["broken"]}], tokenizer_of(folder))
    report(str(caught.value))


@pytest.mark.bad_input
def test_the_check_reads_all_that_training_reads(folder, monkeypatch):
    from PIL import ImageOps

    def fail(image):
        raise TypeError("EXIF")

    monkeypatch.setattr(ImageOps, "exif_transpose", fail)
    with pytest.raises(DataError, match=r"data.jsonl:1: .*0.png cannot be read \(EXIF\)"):
        read(folder, [{"messages": TURN, "images": ["0.png"]}], tokenizer_of(folder))


@pytest.mark.bad_input
def test_limits_of_pixels_hold_in_all_threads_and_leave_filters_of_warnings(folder, monkeypatch):
    import warnings

    from PIL import Image

    Image.new("1", (30, 30)).save(folder / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 800)
    processor, bomb = ImageProcessor(folder / "model"), ImageReference(path=folder / "bomb.png")
    before = list(warnings.filters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as another thread may leave them
        monkeypatch.setattr(warnings, "simplefilter", lambda *arguments: None)
        with pytest.raises(ImageError, match="too many pixels .*30 x 30, above 800"):
            processor.count_tokens([bomb] * 9)
    assert warnings.filters == before


def test_a_rank_without_samples_has_the_fields(folder):
    tokenizer = tokenizer_of(folder)
    (text,) = read(folder, [{"prompt": "<image> a", "images": ["0.png"]}], tokenizer, Prompt, ("prompt",), chat=False)
    batch = encode_prompts([text], tokenizer, max_length=200)
    empty = with_images(batch.select([]), [], tokenizer)
    assert len(empty) == 0 and empty.describe() == with_images(batch, [text], tokenizer).describe()
