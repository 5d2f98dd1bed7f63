"""The names of all methods, where each is defined, and its one line of description. Nothing is imported for it.

To add a method, write its file and add one entry here; a test compares entries with the docstrings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Entry(NamedTuple):
    """target: `package.module:name`. description: the start of its docstring."""

    target: str
    description: str


ENTRIES: Mapping[str, Mapping[str, Entry]] = {
    "datasets": {
        "digits": Entry(
            "leaktight.data.embedded:Digits",
            "Scikit-learn's 1797 handwritten digits, 8x8 scaled up to 32x32 grey, 10 classes; nothing to download.",
        ),
        "photos": Entry(
            "leaktight.data.embedded:Photos",
            "Colour crops of 10 photographs that come with scikit-image and scikit-learn, 32x32, one class per "
            "photograph.",
        ),
        "faces": Entry(
            "leaktight.data.embedded:Faces",
            "100 faces of LFW and 100 patches without a face from scikit-image, 25x25 scaled to 32x32 grey, 2 classes.",
        ),
        "rendered_words": Entry(
            "leaktight.data.words.rendered:RenderedWords",
            "Made-up words drawn in two styles, one like Synth90k and one like SynthText, 32x100 colour; nothing "
            "to download.",
        ),
        "mnist": Entry(
            "leaktight.data.idx:Mnist",
            "MNIST: 70 000 handwritten digits, 28x28 grey, 10 classes.",
        ),
        "fashion_mnist": Entry(
            "leaktight.data.idx:FashionMnist",
            "Fashion-MNIST: 70 000 articles of clothing, 28x28 grey, 10 classes.",
        ),
        "emnist": Entry(
            "leaktight.data.idx:Emnist",
            "EMNIST: handwritten letters and digits, 28x28 grey, 10 to 62 classes by `split`.",
        ),
        "femnist_digits": Entry(
            "leaktight.data.arrays:FemnistDigits",
            "FEMNIST digits: handwriting with the writer as natural client, 28x28 grey (dark on white), 10 classes.",
        ),
        "cifar10": Entry(
            "leaktight.data.cifar:Cifar10",
            "CIFAR-10: 60 000 photographs of animals and vehicles, 32x32 colour, 10 classes.",
        ),
        "cifar100": Entry(
            "leaktight.data.cifar:Cifar100",
            "CIFAR-100: 60 000 photographs, 32x32 colour, 100 fine or 20 coarse classes.",
        ),
        "tiny_imagenet": Entry(
            "leaktight.data.folders:TinyImagenet",
            "Tiny-ImageNet: 200 classes of photographs, 64x64 colour.",
        ),
        "imagenet": Entry(
            "leaktight.data.folders:Imagenet",
            "ImageNet (ILSVRC 2012): 1000 classes of photographs, cut square and scaled to `size`.",
        ),
        "lfw": Entry(
            "leaktight.data.folders:Lfw",
            "Labelled Faces in the Wild: portraits of public figures, one class per person, scaled to `size`.",
        ),
        "vgg_face": Entry(
            "leaktight.data.folders:VggFace",
            "VGG-Face or VGGFace2: faces in one folder per person, scaled to `size`.",
        ),
        "orl_faces": Entry(
            "leaktight.data.arrays:OrlFaces",
            "ORL (AT&T) faces: 40 people, 10 grey portraits of each, cut square and scaled to `size`.",
        ),
        "image_folder": Entry(
            "leaktight.data.folders:ImageFolder",
            "Your own image files: a folder or a zip of class folders, or of train/ and test/ (or val/) with "
            "class folders.",
        ),
        "arrays": Entry(
            "leaktight.data.arrays:Arrays",
            "Your own images and labels in an .npz file.",
        ),
        "synth90k": Entry(
            "leaktight.data.words.collections:Synth90k",
            "Synth90k (MJSynth): 9 million rendered words, 32x100 colour.",
        ),
        "synthtext": Entry(
            "leaktight.data.words.collections:SynthText",
            "SynthText in the Wild: 7 million words rendered into photographs, cut out by gt.mat, scaled to "
            "32x100 colour.",
        ),
        "iiit5k": Entry(
            "leaktight.data.words.collections:Iiit5k",
            "IIIT 5K-Words: 5000 words from signs and posters, scaled to 32x100 colour.",
        ),
        "svt": Entry(
            "leaktight.data.words.collections:Svt",
            "Street View Text: words on shop fronts, cut out of photographs by train.xml and test.xml, scaled to "
            "32x100.",
        ),
        "icdar2015": Entry(
            "leaktight.data.words.collections:Icdar",
            "ICDAR 2015 incidental scene text: cut-out words (word_*.png with gt.txt), scaled to 32x100 colour.",
        ),
        "two_gaussians": Entry(
            "leaktight.data.gaussians:TwoGaussians",
            "Two sets of points in the plane, each of two Gaussian classes with its own centres and standard "
            "deviation.",
        ),
        "joined": Entry(
            "leaktight.data.joined:Joined",
            "Several data sets as one; the data set of an example is its group, the natural client.",
        ),
    },
    "partitions": {
        "iid": Entry(
            "leaktight.data.partition:Iid",
            "Every client gets a random share of the same size.",
        ),
        "shards": Entry(
            "leaktight.data.partition:Shards",
            "Data sorted by label and cut into equal shards; every client gets the same number of random shards.",
        ),
        "lrp_shards": Entry(
            "leaktight.data.partition:LrpShards",
            "Data sorted by label and cut into shards, assigned at random: clients get different numbers of shards.",
        ),
        "dirichlet": Entry(
            "leaktight.data.partition:Dirichlet",
            "Each class is divided among the clients in proportions drawn from a Dirichlet; uneven for a small alpha.",
        ),
        "one_class": Entry(
            "leaktight.data.partition:OneClass",
            "Every client holds examples of one class only; by default one client per class.",
        ),
        "by_source": Entry(
            "leaktight.data.partition:BySource",
            "One client per group of the data set: a writer, or one of several joined data sets.",
        ),
        "pooled": Entry(
            "leaktight.data.partition:Pooled",
            "One client that holds everything: centralised training.",
        ),
    },
    "models": {
        "lenet_zhu": Entry(
            "leaktight.models.small:LeNetZhu",
            "LeNet of DLG: 3 or 4 convolutions of 12 channels, sigmoid, one linear layer (Zhu et al. 2019).",
        ),
        "grnn_lenet": Entry(
            "leaktight.models.small:GrnnLeNet",
            "LeNet-5 with sigmoid and max-pooling, as attacked by GRNN (Ren et al. 2022).",
        ),
        "glaus_cnn": Entry(
            "leaktight.models.small:GlausCnn",
            "Three unpadded 5x5 convolutions (10, 20, 10 channels), sigmoid, one linear layer: GLAUS's MNIST network.",
        ),
        "mlp": Entry(
            "leaktight.models.small:Mlp",
            'Linear layers only; by default two hidden layers of 200, the "2NN" of FedAvg (McMahan et al. 2017).',
        ),
        "logistic_regression": Entry(
            "leaktight.models.small:LogisticRegression",
            "One linear layer on the pixels.",
        ),
        "shallow_cnn": Entry(
            "leaktight.models.small:ShallowCnn",
            "Two padded 5x5 convolutions, each with 2x2 max-pooling, and a hidden layer: FedAvg's CNN (McMahan et "
            "al. 2017).",
        ),
        "resnet20": Entry(
            "leaktight.models.resnet:ResNet20",
            "ResNet-20 for CIFAR, with parameter-free shortcuts.",
        ),
        "resnet32": Entry(
            "leaktight.models.resnet:ResNet32",
            "ResNet-32 for CIFAR, with parameter-free shortcuts.",
        ),
        "resnet56": Entry(
            "leaktight.models.resnet:ResNet56",
            "ResNet-56 for CIFAR, with parameter-free shortcuts.",
        ),
        "resnet20_4": Entry(
            "leaktight.models.resnet:ResNet20x4",
            "ResNet20-4, four times as wide as ResNet-20, with projections (Inverting Gradients, AGIC): 21 "
            "convolutions.",
        ),
        "resnet18": Entry(
            "leaktight.models.resnet:ResNet18",
            "ResNet-18; stem for CIFAR, ImageNet or a leakage study.",
        ),
        "resnet34": Entry(
            "leaktight.models.resnet:ResNet34",
            "ResNet-34; stem for CIFAR, ImageNet or a leakage study.",
        ),
        "resnet50": Entry(
            "leaktight.models.resnet:ResNet50",
            "ResNet-50; stem for CIFAR, ImageNet or a leakage study.",
        ),
        "resnet152": Entry(
            "leaktight.models.resnet:ResNet152",
            "ResNet-152; stem for CIFAR, ImageNet or a leakage study.",
        ),
        "vgg16": Entry(
            "leaktight.models.vgg:Vgg16",
            "VGG-16 without batch norm (Simonyan and Zisserman 2015), for images of 32x32 and more.",
        ),
        "vit": Entry(
            "leaktight.models.vit:Vit",
            "A plain vision transformer, small by default (Dosovitskiy et al. 2021).",
        ),
        "cnn6": Entry(
            "leaktight.models.small:Cnn6",
            "Six bias-free convolutions with leaky ReLU and one bias-free linear layer (R-GAP, Zhu and Blaschko 2021).",
        ),
        "crnn": Entry(
            "leaktight.models.crnn:Crnn",
            "CRNN for words (Shi et al. 2017), as in FedBoosting: log-probabilities (N, T, num_classes + 1), "
            "blank last.",
        ),
    },
    "generators": {
        "dcgan": Entry(
            "leaktight.models.gan:Dcgan",
            "DCGAN of any size from a file: `leaktight generator train` writes such files, PyTorch's example does too.",
        ),
        "mlp_gan": Entry(
            "leaktight.models.gan:MlpGan",
            "Linear layers with ReLU between them, from a file: the small GAN of MNIST tutorials.",
        ),
        "own_generator": Entry(
            "leaktight.models.gan:OwnGenerator",
            "A generator of your own: the network that a function returns, with weights from a file.",
        ),
    },
    "schedules": {
        "constant": Entry(
            "leaktight.core.training:Constant",
            "The same learning rate in every round.",
        ),
        "cosine": Entry(
            "leaktight.core.training:Cosine",
            "Half a cosine from the initial learning rate towards `final` times it, over all rounds.",
        ),
        "steps": Entry(
            "leaktight.core.training:Steps",
            "Multiply by `gamma` when a share of all rounds has passed, once for each of `milestones`.",
        ),
    },
    "aggregators": {
        "fedavg": Entry(
            "leaktight.fl.aggregators:FedAvg",
            "The weighted mean of the clients' changes.",
        ),
        "fedsgd": Entry(
            "leaktight.fl.aggregators:FedSgd",
            "One step of the server along the mean gradient of the clients' batches, weighted by their sizes.",
        ),
        "server_momentum": Entry(
            "leaktight.fl.aggregators:ServerMomentum",
            "FedAvg whose mean change passes through momentum at the server (FedAvgM).",
        ),
        "server_adam": Entry(
            "leaktight.fl.aggregators:ServerAdam",
            "FedAvg whose mean change passes through Adam at the server (FedAdam), without bias correction.",
        ),
        "fedboosting": Entry(
            "leaktight.fl.fedboosting:FedBoosting",
            "Weights clients by their training loss and by how well their models do on the other clients' "
            "validation data.",
        ),
        "encrypted": Entry(
            "leaktight.fl.encrypted:Encrypted",
            "Homomorphic encryption around a linear aggregator: the server adds up updates that only clients "
            "could read.",
        ),
    },
    "ciphers": {
        "paillier": Entry(
            "leaktight.crypto.paillier:Paillier",
            "Paillier encryption of quantised values, many to a ciphertext; sums with integer weights are exact.",
        ),
        "ckks": Entry(
            "leaktight.crypto.ckks:Ckks",
            "CKKS encryption of floating-point vectors (TenSEAL): quick, approximate, ciphertexts ten times as large.",
        ),
    },
    "fusions": {
        "fixed": Entry(
            "leaktight.fl.fedboosting:FixedFusion",
            "Every mixture is 0.9 of one update, the rest in equal parts of the others; every client can undo it.",
        ),
        "noisy": Entry(
            "leaktight.fl.fedboosting:NoisyFusion",
            "Mixtures with weights that only the server knows, drawn anew every round, and Gaussian noise on "
            "every value.",
        ),
    },
    "defenses": {
        "none": Entry(
            "leaktight.core.protocols:Defense",
            "No defense: every hook is the identity. A subclass has its settings as fields, and its memory in `state`.",
        ),
        "noise": Entry(
            "leaktight.defenses.noise:AdditiveNoise",
            "Adds independent Gaussian or Laplace noise to every element, at each local step or once to the update.",
        ),
        "clipping": Entry(
            "leaktight.defenses.clipping:Clipping",
            "Scales down whatever has a norm above `clip_norm`: the whole gradient, each tensor, or each "
            "example's gradient.",
        ),
        "compression": Entry(
            "leaktight.defenses.compression:GradientCompression",
            "Sets the smallest entries to zero (GC): a share of each tensor, or of all tensors together.",
        ),
        "minmax": Entry(
            "leaktight.defenses.minmax:MinMaxSampling",
            "Keeps a random few entries, an entry g with probability g^2 / (g^2 + C), and sets the rest to zero "
            "(MMS, UGS).",
        ),
        "soteria": Entry(
            "leaktight.defenses.soteria:Soteria",
            "Zeroes columns of the last linear layer's gradient: the features that depend least on the input for "
            "their size.",
        ),
        "graddefense": Entry(
            "leaktight.defenses.graddefense:GradDefense",
            "Adds noise to a random half of the gradient's slices, which are cut to be equally sensitive to the input.",
        ),
        "outpost": Entry(
            "leaktight.defenses.outpost:Outpost",
            "Prunes small gradients, then adds noise where the Fisher information is high; less often at later steps.",
        ),
        "dp_sgd": Entry(
            "leaktight.defenses.dp_sgd:DpSgd",
            "Clips the gradient of each example, adds Gaussian noise to the mean, and accounts for it: (epsilon, "
            "delta)-DP.",
        ),
        "fed_cdp": Entry(
            "leaktight.defenses.fed_cdp:FedCdp",
            "Clips the gradient of each example layer by layer, to a norm that may decay over the rounds, and adds "
            "noise.",
        ),
        "client_dp": Entry(
            "leaktight.defenses.client_dp:ClientDp",
            "Clips a client's whole update and adds Gaussian noise to it, accounted over rounds: DP of clients.",
        ),
        "adadefense": Entry(
            "leaktight.defenses.adadefense:AdaDefense",
            "Sends a stand-in for the update: the step that Adam (or Adagrad, Yogi) makes of it with the client's "
            "own moments.",
        ),
        "stack": Entry(
            "leaktight.defenses.stack:Stack",
            "Several defenses in order: each acts on the output of the one before.",
        ),
        "lrp": Entry(
            "leaktight.defenses.lrp:Lrp",
            "Draws the learning rate of every local step from U(0, 2 p_k N eta); neither rates nor p_k leave the "
            "client.",
        ),
        "ada_lrp": Entry(
            "leaktight.defenses.ada_lrp:AdaLrp",
            "LRP with rates from U(0, 2 K p_k N eta), where K grows with the number of classes that a client holds.",
        ),
        "fedkl": Entry(
            "leaktight.defenses.fedkl:FedKl",
            "FedKL: batch norm whose scale and shift come from a private key through a private lock (Ren et al.).",
        ),
        "precode": Entry(
            "leaktight.defenses.precode:Precode",
            "PRECODE: a variational bottleneck before the last linear layer makes gradients random (Scheliga et "
            "al. 2022).",
        ),
    },
    "attacks": {
        "dlg": Entry(
            "leaktight.attacks.presets.dlg:Dlg",
            "Deep Leakage from Gradients: squared distance, image and label searched together, L-BFGS.",
        ),
        "idlg": Entry(
            "leaktight.attacks.presets.idlg:IdlgAttack",
            "iDLG: the label is read from the last layer, then the image is searched as in DLG.",
        ),
        "cpl": Entry(
            "leaktight.attacks.presets.cpl:Cpl",
            "CPL: iDLG from a start that repeats one random patch.",
        ),
        "csdlg": Entry(
            "leaktight.attacks.presets.csdlg:CsDlg",
            "Cosine DLG: cosine distance with L-BFGS and known labels, as OUTPOST attacks.",
        ),
        "inverting_gradients": Entry(
            "leaktight.attacks.presets.inverting_gradients:InvertingGradients",
            "Inverting Gradients: cosine distance, total variation, signed Adam in a box.",
        ),
        "gradinversion": Entry(
            "leaktight.attacks.presets.gradinversion:GradInversion",
            "GradInversion: squared distance, batch-norm statistics, total variation, restarts drawn to their "
            "consensus.",
        ),
        "agic": Entry(
            "leaktight.attacks.presets.agic:Agic",
            "AGIC: the change of a round taken for one batch's gradient, layer-weighted cosine, epochs joined.",
        ),
        "grnn": Entry(
            "leaktight.attacks.generative.grnn:Grnn",
            "GRNN: an untrained generator learns to make images and labels whose gradient is the one that was seen.",
        ),
        "ggl": Entry(
            "leaktight.attacks.generative.ggl:Ggl",
            "GGL: searches a generator's latent for an image that explains the update, by CMA-ES, Adam or a "
            "Gaussian process.",
        ),
        "gias": Entry(
            "leaktight.attacks.generative.gias:Gias",
            "GIAS: searches a generator's latents, the best of some starts, then the weights of one generator per "
            "image.",
        ),
        "linear_inversion": Entry(
            "leaktight.attacks.exact.linear_inversion:LinearInversion",
            "Linear-layer inversion: the first layer's weight gradient over its bias gradient, in closed form.",
        ),
        "rgap": Entry(
            "leaktight.attacks.exact.rgap:RGap",
            "R-GAP: recursive gradient attack on privacy, the input solved layer by layer from the last to the first.",
        ),
        "robbing_the_fed": Entry(
            "leaktight.attacks.malicious.robbing_the_fed:RobbingTheFed",
            "Robbing the Fed: an imprint module before the first layer sorts images into bins; each bin of one "
            "image is exact.",
        ),
        "fishing": Entry(
            "leaktight.attacks.malicious.fishing:Fishing",
            "Fishing: a changed last layer makes one image of a batch dominate the gradient; then that one is "
            "inverted.",
        ),
        "glaus": Entry(
            "leaktight.attacks.presets.glaus:Glaus",
            "GLAUS: asks for samples of one gradient again and again, estimates it from which entries come, then DLG.",
        ),
        "prior_only": Entry(
            "leaktight.attacks.controls:PriorOnly",
            "Negative control: the same search by total variation alone, without a look at the update.",
        ),
        "mean_image": Entry(
            "leaktight.attacks.controls:MeanImage",
            "The same image for every example: the mean of the public data where they are known, mid-grey where not.",
        ),
        "nearest_public_image": Entry(
            "leaktight.attacks.controls:NearestPublicImage",
            "The public images whose own gradients point most nearly where the update does, one per example, none "
            "twice.",
        ),
    },
    "labels": {
        "given": Entry(
            "leaktight.attacks.labels.rules:Given",
            "The labels that the threat model discloses. Works for every task.",
        ),
        "idlg": Entry(
            "leaktight.attacks.labels.rules:Idlg",
            "One example: the class whose row of the last weight's gradient has the smallest sum.",
        ),
        "yin": Entry(
            "leaktight.attacks.labels.rules:Yin",
            "No label twice: the classes with the smallest entries in their rows of the last weight's gradient.",
        ),
        "bias_corrected": Entry(
            "leaktight.attacks.labels.rules:BiasCorrected",
            "Every class with a negative bias gradient once; then, repeatedly, the lowest after one example's "
            "share is off.",
        ),
        "wainakh": Entry(
            "leaktight.attacks.labels.rules:Wainakh",
            "The same on the row sums of the last weight's gradient, with 1 + 1 / C times the share (LLG).",
        ),
        "geng": Entry(
            "leaktight.attacks.labels.rules:Geng",
            "Counts of labels, repeats allowed: K (p_c - sum of row c / O), with p and O, the sum of the "
            "features, from noise.",
        ),
    },
    "metrics": {
        "mse": Entry(
            "leaktight.metrics:METRICS",
            "mean squared error on [0, 1]",
        ),
        "psnr": Entry(
            "leaktight.metrics:METRICS",
            "peak signal-to-noise ratio in dB, at most 100",
        ),
        "ssim": Entry(
            "leaktight.metrics:METRICS",
            "structural similarity, Gaussian window of 11 pixels",
        ),
        "lpips_alex": Entry(
            "leaktight.metrics:METRICS",
            "learned perceptual distance, AlexNet (needs its ImageNet weights)",
        ),
        "lpips_vgg": Entry(
            "leaktight.metrics:METRICS",
            "learned perceptual distance, VGG16 (needs its ImageNet weights)",
        ),
        "mse_r": Entry(
            "leaktight.metrics:METRICS",
            "mean squared error of the input of the model's final linear layer",
        ),
        "label_accuracy": Entry(
            "leaktight.metrics:METRICS",
            "share of the batch's labels that were named, in any order",
        ),
        "grnn_mae": Entry(
            "leaktight.metrics:METRICS",
            "GRNN's 'mses': mean absolute error on [0, 1]",
        ),
        "thesis_mse_255": Entry(
            "leaktight.metrics:METRICS",
            "thesis, chapter 3: MSE on 0..255",
        ),
        "thesis_psnr": Entry(
            "leaktight.metrics:METRICS",
            "thesis, chapter 3: 10 log10(255^2 / MSE)",
        ),
        "fedkl_rmse": Entry(
            "leaktight.metrics:METRICS",
            "FedKL's and AdaDefense's 'MSE': RMSE of bytes",
        ),
        "fedkl_psnr": Entry(
            "leaktight.metrics:METRICS",
            "FedKL's and AdaDefense's 10 log10(255^2 / RMSE)",
        ),
        "ggl_psnr": Entry(
            "leaktight.metrics:METRICS",
            "GGL's and LRP's PSNR, 6.02 dB below the true one",
        ),
        "ig_psnr_normalised": Entry(
            "leaktight.metrics:METRICS",
            "Inverting Gradients' PSNR on normalised images",
        ),
        "plato_min_mse": Entry(
            "leaktight.metrics:METRICS",
            "Plato's least MSE over all truths on normalised images",
        ),
        "plato_psnr_2022": Entry(
            "leaktight.metrics:METRICS",
            "Plato's PSNR of 2022, from its least MSE",
        ),
    },
}
