"""Published data sets and weights: addresses, checksums, terms, and instructions for manual downloads.

A comment names the origin of each checksum. A data set without a published checksum is `manual`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from leaktight.data.download import RemoteFile


@dataclass(frozen=True, kw_only=True)
class Source:
    """A published data set or set of weights.

    folder: its path below the data root. files: downloaded into it. archive: downloaded and unpacked as the folder, or
    its part below `subtree`. contents: published checksums of unpacked files. manual: instructions for a data set that
    needs an agreement or has no published checksum; `{folder}` stands for the folder.
    """

    description: str
    terms: str
    folder: str
    files: tuple[RemoteFile, ...] = ()
    archive: RemoteFile | None = None
    subtree: str = ""
    contents: Mapping[str, str] = field(default_factory=dict)
    manual: str = ""

    def __post_init__(self) -> None:
        if bool(self.manual) == bool(self.files or self.archive):
            raise ValueError(f"expected either files to fetch or an explanation, got {self.description!r}")


def _files(addresses: tuple[str, ...], checksums: Mapping[str, str]) -> tuple[RemoteFile, ...]:
    """Files by name, each available below all of the addresses."""
    return tuple(
        RemoteFile(name=name, urls=tuple(address + name for address in addresses), checksum=checksum)
        for name, checksum in checksums.items()
    )


_MNIST = Source(
    description="MNIST: 70 000 handwritten digits, 28x28, grey",
    terms="Creative Commons Attribution-ShareAlike 3.0",
    folder="mnist",
    # torchvision's MD5 sums are of the same bytes.
    files=_files(
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "train-labels-idx1-ubyte.gz": "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "t10k-images-idx3-ubyte.gz": "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "t10k-labels-idx1-ubyte.gz": "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
)

_FASHION = Source(
    description="Fashion-MNIST: 70 000 articles of clothing, 28x28, grey",
    terms="MIT",
    folder="fashion_mnist",
    # torchvision
    files=_files(
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        {
            "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
)

_CIFAR_TERMS = "no licence stated; cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"

_CIFAR10 = Source(
    description="CIFAR-10: 60 000 photographs in 10 classes, 32x32, colour",
    terms=_CIFAR_TERMS,
    folder="cifar-10-batches-py",
    # torchvision
    archive=RemoteFile(
        name="cifar-10-python.tar.gz",
        urls=("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
        checksum="md5:c58f30108f718f92721af3b95e74349a",
    ),
    subtree="cifar-10-batches-py",
    contents={
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "md5:40351d587109b95175f43aff81a1287e",
        "batches.meta": "md5:5ff9c542aee3614f3951f8cda6e48888",
    },
)

_CIFAR100 = Source(
    description="CIFAR-100: 60 000 photographs in 100 classes, 32x32, colour",
    terms=_CIFAR_TERMS,
    folder="cifar-100-python",
    # torchvision
    archive=RemoteFile(
        name="cifar-100-python.tar.gz",
        urls=("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",),
        checksum="md5:eb9058c3a382ffc7106e4002c42a8d85",
    ),
    subtree="cifar-100-python",
    contents={
        "train": "md5:16019d7e3df5f24257cddd939b257f8d",
        "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
        "meta": "md5:7973b15100ade9c7d40fb424638fde48",
    },
)

_EMNIST = Source(
    description="EMNIST: handwritten letters and digits in six splits, 28x28, grey (0.5 GB)",
    terms="no licence stated (NIST); cite Cohen et al., EMNIST: an extension of MNIST to handwritten letters, 2017",
    folder="emnist",
    # torchvision
    archive=RemoteFile(
        name="emnist-gzip.zip",
        urls=(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
        ),
        checksum="md5:58c8d27c78d21e728a6bc7b3cc06412e",
    ),
    subtree="gzip",
)

_TINY_IMAGENET = Source(
    description="Tiny-ImageNet: 110 000 labelled photographs in 200 classes, 64x64, colour (0.25 GB)",
    terms="the terms of ImageNet: research and education, not commercial",
    folder="tiny_imagenet",
    # The MD5 sum that many loaders on GitHub agree on.
    archive=RemoteFile(
        name="tiny-imagenet-200.zip",
        urls=("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
        checksum="md5:90528d7ca1a48142e341f4ef8d21d0de",
        size=248_100_043,
    ),
)

_LFW = Source(
    description="Labeled Faces in the Wild: 13 233 photographs of 5749 people, 250x250, colour (0.2 GB)",
    terms="research only; photographs of people from news sites",
    folder="lfw",
    # scikit-learn
    archive=RemoteFile(
        name="lfw.tgz",
        urls=("http://vis-www.cs.umass.edu/lfw/lfw.tgz", "https://ndownloader.figshare.com/files/5976018"),
        checksum="sha256:055f7d9c632d7370e6fb4afc7468d40f970c34a80d4c6f50ffec63f5a8d536c0",
    ),
)

_SVT = Source(
    description="Street View Text: 350 street photographs with 904 words marked (0.1 GB)",
    terms="research; cite Wang et al., End-to-end Scene Text Recognition, 2011",
    folder="svt",
    # MMOCR
    archive=RemoteFile(
        name="svt.zip",
        urls=("http://www.iapr-tc11.org/dataset/SVT/svt.zip",),
        checksum="md5:42d19160010d990ae6223b14f45eff88",
    ),
)

_IIIT5K = Source(
    description="IIIT 5K-Words: 5000 cropped words from scenes and born-digital images (0.1 GB)",
    terms="research; cite Mishra et al., Scene Text Recognition using Higher Order Language Priors, 2012",
    folder="iiit5k",
    # docTR
    archive=RemoteFile(
        name="IIIT5K-Word_V3.0.tar.gz",
        urls=(
            "https://cvit.iiit.ac.in/images/Projects/SceneTextUnderstanding/IIIT5K-Word_V3.0.tar.gz",
            "http://cvit.iiit.ac.in/projects/SceneTextUnderstanding/IIIT5K-Word_V3.0.tar.gz",
        ),
        checksum="sha256:7872c9efbec457eb23f3368855e7738f72ce10927f52a382deb4966ca0ffa38e",
    ),
)

_SYNTH90K = Source(
    description="Synth90K (MJSynth): 9 million rendered words (10 GB, 32 GB unpacked)",
    terms="research, not commercial; cite Jaderberg et al., Synthetic Data and Artificial Neural Networks, 2014",
    folder="mjsynth",
    # MMOCR
    archive=RemoteFile(
        name="mjsynth.tar.gz",
        urls=(
            "https://thor.robots.ox.ac.uk/~vgg/data/text/mjsynth.tar.gz",
            "https://www.robots.ox.ac.uk/~vgg/data/text/mjsynth.tar.gz",
        ),
        checksum="md5:7bf2b60ad935eaf64e5b606f782d68e5",
    ),
)

_SYNTHTEXT = Source(
    description="SynthText in the Wild: 800 000 scenes with rendered words (41 GB)",
    terms="research, not commercial; cite Gupta et al., Synthetic Data for Text Localisation, 2016",
    folder="synthtext",
    # docTR
    archive=RemoteFile(
        name="SynthText.zip",
        urls=("https://thor.robots.ox.ac.uk/~vgg/data/scenetext/SynthText.zip",),
        checksum="sha256:28ab030485ec8df3ed612c568dd71fb2793b9afbfa3a9d9c6e792aef33265bf1",
    ),
)

_ICDAR2015 = Source(
    description="ICDAR 2015 Incidental Scene Text, task 4.3: 4468 training and 2077 test words",
    terms="registration at rrc.cvc.uab.es; cite Karatzas et al., ICDAR 2015 Competition on Robust Reading, 2015",
    folder="icdar2015",
    manual=(
        "register at https://rrc.cvc.uab.es/?ch=4&com=downloads, download ch4_training_word_images_gt.zip, "
        "ch4_test_word_images_gt.zip and Challenge4_Test_Task3_GT.txt of task 4.3, and unpack each to "
        "{folder}/<name of the zip>/; the text file goes beside them"
    ),
)

_IMAGENET = Source(
    description="ImageNet ILSVRC 2012: 1.28 million photographs in 1000 classes (150 GB)",
    terms="an agreement with image-net.org: research and education, not commercial",
    folder="imagenet",
    manual=(
        "sign the agreement at https://image-net.org/download, fetch ILSVRC2012_img_train.tar "
        "(md5 1d675b47d978889d74fa0da5fadfb00e) and ILSVRC2012_img_val.tar (md5 29b22e2961454d5413ddabcf34fc5622), and "
        "unpack them to {folder}/train/<wnid>/*.JPEG and {folder}/val/<wnid>/*.JPEG, one folder per class"
    ),
)

_VGG_FACE = Source(
    description="VGG-Face: photographs of 2622 people, published as lists of addresses",
    terms="not commercial; the photographs belong to others",
    folder="vgg_face",
    manual=(
        "Oxford published lists of addresses, not images, and has withdrawn them; put the images that you are entitled "
        "to use at {folder}/train/<person>/*.jpg, one folder per person"
    ),
)

_SCUT_FORU = Source(
    description="SCUT-FORU (English2k): 1715 photographs with 5421 words marked",
    terms="research; South China University of Technology",
    folder="scut_foru",
    manual=(
        "download SCUT_FORU_DB_Release.rar, which https://github.com/yan647/SCUT_FORU_DB_Release links to, and unpack "
        "it to {folder}/; its authors published no checksum"
    ),
)

_LPIPS = Source(
    description="AlexNet and VGG16 trained on ImageNet, and the heads of LPIPS 0.1: for the LPIPS metric (0.8 GB)",
    terms="BSD 3-Clause (torchvision), BSD 2-Clause (LPIPS)",
    folder="lpips_trunks",
    # The file names hold the first digits of the SHA-256; the heads are the same as in torchmetrics.
    files=(
        *_files(
            ("https://download.pytorch.org/models/",),
            {
                "alexnet-owt-7be5be79.pth": "sha256-prefix:7be5be79",
                "vgg16-397923af.pth": "sha256-prefix:397923af",
            },
        ),
        *(
            RemoteFile(
                name=f"heads_v0.1/{name}.pth",
                urls=(f"https://github.com/richzhang/PerceptualSimilarity/raw/master/lpips/weights/v0.1/{name}.pth",),
                checksum=checksum,
                size=size,
            )
            for name, checksum, size in (
                ("alex", "sha256:df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0", 6009),
                ("vgg", "sha256:a78928a0af1e5f0fcb1f3b9e8f8c3a2a5a3de244d830ad5c1feddc79b8432868", 7289),
            )
        ),
    ),
)

_CIFAR10_RESNET = Source(
    description="ResNet-20, 32 and 56 trained on CIFAR-10 (91.7, 92.6 and 93.4 % correct)",
    terms="BSD 2-Clause; Yerlan Idelbayev",
    folder="weights_cifar10_resnet",
    # The file names hold the first digits of the SHA-256.
    files=_files(
        ("https://github.com/akamaster/pytorch_resnet_cifar10/raw/master/pretrained_models/",),
        {
            "resnet20-12fca82f.th": "sha256:12fca82f0bebc4135bf1f32f6e3710e61d5108578464b84fd6d7f5c1b04036c8",
            "resnet32-d509ac18.th": "sha256:d509ac1820d7f25398913559d7e81a13229b1e7adc5648e3bfa5e22dc137f850",
            "resnet56-4bfd9763.th": "sha256:4bfd97631478d6b638d2764fd2baff3edb1d7d82252d54439343b6596b9b5367",
        },
    ),
)

SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "cifar10": _CIFAR10,
        "cifar10_resnet": _CIFAR10_RESNET,
        "cifar100": _CIFAR100,
        "emnist": _EMNIST,
        "fashion_mnist": _FASHION,
        "icdar2015": _ICDAR2015,
        "iiit5k": _IIIT5K,
        "imagenet": _IMAGENET,
        "lfw": _LFW,
        "lpips": _LPIPS,
        "mnist": _MNIST,
        "scut_foru": _SCUT_FORU,
        "svt": _SVT,
        "synth90k": _SYNTH90K,
        "synthtext": _SYNTHTEXT,
        "tiny_imagenet": _TINY_IMAGENET,
        "vgg_face": _VGG_FACE,
    }
)
"""By the name that `leaktight data` accepts."""
