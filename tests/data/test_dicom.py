"""DICOM files that pydicom writes: gray of any bits, color, and what is refused."""

import io
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from leakbound.data import dicom as dicom_module
from leakbound.data import load

IMPLICIT, EXPLICIT, DEFLATED = (f"1.2.840.10008.1.2{end}" for end in ("", ".1", ".1.99"))
RLE, JPEG, JPEG_LS = (f"1.2.840.10008.1.2.{end}" for end in ("5", "4.50", "4.80"))


def written(pixels, syntax=EXPLICIT, compress=None, frame=None, **more):
    """The bytes of a DICOM file with these pixels (H, W), or (H, W, 3), or a compressed frame."""
    pydicom = pytest.importorskip("pydicom")
    meta = pydicom.dataset.FileMetaDataset()
    meta.TransferSyntaxUID = pydicom.uid.UID(syntax)
    meta.MediaStorageSOPClassUID = pydicom.uid.UID("1.2.840.10008.5.1.4.1.1.7")
    meta.MediaStorageSOPInstanceUID = pydicom.uid.UID("1.2.3.4")
    found = pydicom.dataset.Dataset()
    found.file_meta = meta
    found.SOPClassUID, found.SOPInstanceUID = meta[0x00020002].value, meta[0x00020003].value
    found.PatientName = "Secret^Name"
    color = pixels.ndim > 2 and pixels.shape[-1] == 3
    found.Rows, found.Columns = pixels.shape[-3:-1] if color else pixels.shape[-2:]
    found.SamplesPerPixel = 3 if color else 1
    found.PhotometricInterpretation = "RGB" if color else "MONOCHROME2"
    found.PlanarConfiguration = 0
    found.BitsAllocated = 8 * pixels.dtype.itemsize
    found.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in ({"BitsStored": found.BitsAllocated} | more).items():
        setattr(found, name, value)
    found.HighBit = found.BitsStored - 1
    found.PixelData = pixels.tobytes() if frame is None else pydicom.encaps.encapsulate([frame])
    if compress is not None:
        found.compress(compress)
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, found, enforce_file_format=True)
    return stream.getvalue()


def put(folder, *files, name="{k}.dcm"):
    for k, content in enumerate(files):
        place = folder / f"c{k % 2}" / name.format(k=k)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return f"folder:{folder}"


def gray(bits, seed=0, kind=np.uint16):
    low = -(2 ** (bits - 1)) if kind(0).dtype.kind == "i" else 0
    values = np.random.default_rng(seed).integers(low, low + 2**bits, (6, 5)).astype(kind)
    values[0, :2] = low, low + 2**bits - 1
    return values


@pytest.mark.parametrize("syntax", [IMPLICIT, EXPLICIT])
@pytest.mark.parametrize(
    ("bits", "kind"), [(12, np.uint16), (16, np.uint16), (8, np.uint8), (12, np.int16)]
)
def test_gray_values_are_parts_of_the_range_of_their_bits(syntax, bits, kind, tmp_path):
    values = [gray(bits, seed, kind) for seed in range(2)]
    data = load(put(tmp_path, *(written(v, syntax, BitsStored=bits) for v in values)))
    low = -(2 ** (bits - 1)) if kind(0).dtype.kind == "i" else 0
    wanted = [(v.astype(float) - low) / (2**bits - 1) for v in values]
    assert np.allclose(data.inputs[:, 0].numpy(), wanted, atol=1e-6)
    assert (data.class_names, data.files) == (("c0", "c1"), ("c0/0.dcm", "c1/1.dcm"))
    assert (float(data.inputs.min()), float(data.inputs.max())) == (0.0, 1.0)


@pytest.mark.parametrize("syntax", [IMPLICIT, EXPLICIT])
def test_gray_frames_are_a_volume(syntax, tmp_path):
    frames = [np.stack([gray(12, 4 * k + at) for at in range(4)]) for k in range(2)]
    given = {"BitsStored": 12, "NumberOfFrames": 4}
    source = put(tmp_path, *(written(one, syntax, **given) for one in frames))
    data = load(source)
    assert data.domain.name == "volumes"
    assert data.inputs.shape == (2, 1, 4, 6, 5)
    assert np.allclose(data.inputs[:, 0].numpy(), np.stack(frames) / 4095, atol=1e-6)
    with pytest.raises(ValueError, match="a volume has no size or channels to change"):
        load(source, size=8)
    other = written(gray(12), BitsStored=12)
    with pytest.raises(ValueError, match="resample all"):
        load(put(tmp_path, other, name="z{k}.dcm"))


def test_values_are_not_inverted_or_rescaled(tmp_path):
    more = {"PhotometricInterpretation": "MONOCHROME1", "RescaleSlope": 2, "RescaleIntercept": -9}
    plain = load(put(tmp_path / "a", *[written(gray(12), BitsStored=12)] * 2))
    other = load(put(tmp_path / "b", *[written(gray(12), BitsStored=12, **more)] * 2))
    assert other.inputs.equal(plain.inputs)


def test_color_and_run_lengths(tmp_path):
    values = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    data = load(put(tmp_path, written(values), written(values, compress=RLE)))
    assert data.inputs.shape == (2, 3, 4, 5)
    assert np.allclose(data.inputs.numpy() * 255, values.transpose(2, 0, 1), atol=1e-3)


def test_a_compressed_frame_is_what_pillow_reads(tmp_path):
    stream, values = io.BytesIO(), gray(8, kind=np.uint8)
    Image.fromarray(values).save(stream, "jpeg")
    file = written(values, JPEG, frame=stream.getvalue())
    found = load(put(tmp_path, file, file)).inputs[0, 0].numpy()
    assert np.allclose(found * 255, np.asarray(Image.open(stream)), atol=1e-3)


def test_files_without_an_ending_are_known_by_their_first_bytes(tmp_path):
    files = [written(gray(12, seed), BitsStored=12) for seed in range(2)]
    data = load(put(tmp_path, *files, name="IM{k}"))
    assert data.files == ("c0/IM0", "c1/IM1")
    place = shutil.make_archive(tmp_path.parent / "packed", "zip", tmp_path)
    assert load(f"zip:{place}").inputs.equal(data.inputs)


def test_no_name_of_a_patient_is_kept(tmp_path):
    data = load(put(tmp_path, *[written(gray(8, kind=np.uint8))] * 2))
    assert "Secret" not in repr(data)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: written(gray(12), DEFLATED, BitsStored=12), "is deflated as a whole"),
        (
            lambda: written(gray(12), BitsStored=12, Rows=60_000, Columns=60_000),
            "declares 60000 x 60000 pixels in 1 frames; the limit is 50000000 in all",
        ),
        (
            lambda: written(np.zeros((3, 6, 5, 3), np.uint8), NumberOfFrames=3),
            "holds 3 pictures in color; save the one",
        ),
        (
            lambda: written(gray(8, kind=np.uint8), PhotometricInterpretation="PALETTE COLOR"),
            "has colors as PALETTE COLOR; save it as gray values or RGB",
        ),
        (lambda: written(gray(12), BitsStored=12)[:-9], "cannot be read; it is damaged"),
        (lambda: bytes(128) + b"DICM", "cannot be read; it is damaged, or holds no image"),
        (lambda: b"no image", "cannot be read"),
        (
            lambda: written(gray(8, kind=np.uint8), JPEG, frame=b"no JPEG"),
            "cannot be read; it is damaged",
        ),
        (
            lambda: written(gray(8, kind=np.uint8), JPEG_LS, frame=b"no JPEG"),
            r"in a way that no installed decoder reads \(1.*4.80\); save it uncompressed",
        ),
    ],
)
def test_what_is_refused_names_the_file(make, words, tmp_path):
    pytest.importorskip("pydicom")
    with pytest.raises(ValueError, match=rf"image 'c0/0.dcm' .*({words})"):
        load(put(tmp_path, make(), make()))


def test_bits_are_those_of_the_header(tmp_path):
    source = put(tmp_path, *[written(gray(12), BitsStored=12)] * 2)
    with pytest.raises(ValueError, match=r"bits is 12, which image 'c0/0.dcm' does not need"):
        load(source, bits=12)


def test_without_pydicom_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    for name in ("{k}.dcm", "{k}.DICOM", "IM{k}"):
        folder = tmp_path / name.strip("{}")
        source = put(folder, *[bytes(128) + b"DICM"] * 2, name=name)
        with pytest.raises(ValueError, match=r"needs the package pydicom; .*leakbound\[medical\]"):
            load(source)


def test_other_files_are_no_dicom():
    assert not dicom_module.begins(bytes(128))
    assert not dicom_module.begins(b"DICM" + bytes(128))
