"""Bibliographic data of the works that the library implements."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["REFERENCES", "Reference"]

VENUES = {"inproceedings": "booktitle", "article": "journal", "phdthesis": "school", "techreport": "institution"}


@dataclass(frozen=True)
class Reference:
    """A bibliographic entry; `kind` is its BibTeX type."""

    author: str
    title: str
    venue: str
    year: int
    kind: str = "inproceedings"

    def bibtex(self, key: str) -> str:
        """Return the BibTeX entry; double braces preserve the capitals of the title.

        >>> print(Reference("Liu, Weiyang", "Deep Learning", "CVPR", 2017).bibtex("liu2017"))
        @inproceedings{liu2017,
          author = {Liu, Weiyang},
          title = {{Deep Learning}},
          booktitle = {CVPR},
          year = {2017}
        }
        """
        lines = [
            f"  author = {{{self.author}}}",
            f"  title = {{{{{self.title}}}}}",
            f"  {VENUES[self.kind]} = {{{self.venue}}}",
            f"  year = {{{self.year}}}",
        ]
        return f"@{self.kind}{{{key},\n" + ",\n".join(lines) + "\n}"


REFERENCES: dict[str, Reference] = {
    "liu2020thesis": Reference(
        "Liu, Weiyang",
        "Deep Representation Learning on Hypersphere",
        "Georgia Institute of Technology",
        2020,
        "phdthesis",
    ),
    "liu2016large": Reference(
        "Liu, Weiyang and Wen, Yandong and Yu, Zhiding and Yang, Meng",
        "Large-Margin Softmax Loss for Convolutional Neural Networks",
        "ICML",
        2016,
    ),
    "liu2017sphereface": Reference(
        "Liu, Weiyang and Wen, Yandong and Yu, Zhiding and Li, Ming and Raj, Bhiksha and Song, Le",
        "SphereFace: Deep Hypersphere Embedding for Face Recognition",
        "CVPR",
        2017,
    ),
    "liu2017hyperspherical": Reference(
        "Liu, Weiyang and Zhang, Yan-Ming and Li, Xingguo and Yu, Zhiding and Dai, Bo and Zhao, Tuo and Song, Le",
        "Deep Hyperspherical Learning",
        "NeurIPS",
        2017,
    ),
    "liu2018decoupled": Reference(
        "Liu, Weiyang and Liu, Zhen and Yu, Zhiding and Dai, Bo and Lin, Rongmei and Wang, Yisen and Rehg, James M. "
        "and Song, Le",
        "Decoupled Networks",
        "CVPR",
        2018,
    ),
    "liu2018energy": Reference(
        "Liu, Weiyang and Lin, Rongmei and Liu, Zhen and Liu, Lixin and Yu, Zhiding and Dai, Bo and Song, Le",
        "Learning towards Minimum Hyperspherical Energy",
        "NeurIPS",
        2018,
    ),
    "lin2020regularizing": Reference(
        "Lin, Rongmei and Liu, Weiyang and Liu, Zhen and Feng, Chen and Yu, Zhiding and Rehg, James M. and Xiong, Li "
        "and Song, Le",
        "Regularizing Neural Networks via Minimizing Hyperspherical Energy",
        "CVPR",
        2020,
    ),
    "liu2021orthogonal": Reference(
        "Liu, Weiyang and Lin, Rongmei and Liu, Zhen and Rehg, James M. and Paull, Liam and Xiong, Li and Song, Le "
        "and Weller, Adrian",
        "Orthogonal Over-Parameterized Training",
        "CVPR",
        2021,
    ),
    "wang2018additive": Reference(
        "Wang, Feng and Liu, Weiyang and Liu, Haijun and Cheng, Jian",
        "Additive Margin Softmax for Face Verification",
        "arXiv preprint arXiv:1801.05599",
        2018,
        "article",
    ),
    "wang2018cosface": Reference(
        "Wang, Hao and Wang, Yitong and Zhou, Zheng and Ji, Xing and Gong, Dihong and Zhou, Jingchao and Li, Zhifeng "
        "and Liu, Wei",
        "CosFace: Large Margin Cosine Loss for Deep Face Recognition",
        "CVPR",
        2018,
    ),
    "deng2019arcface": Reference(
        "Deng, Jiankang and Guo, Jia and Xue, Niannan and Zafeiriou, Stefanos",
        "ArcFace: Additive Angular Margin Loss for Deep Face Recognition",
        "CVPR",
        2019,
    ),
    "kim2022adaface": Reference(
        "Kim, Minchul and Jain, Anil K. and Liu, Xiaoming",
        "AdaFace: Quality Adaptive Margin for Face Recognition",
        "CVPR",
        2022,
    ),
    "liu2022revived": Reference(
        "Liu, Weiyang and Wen, Yandong and Raj, Bhiksha and Singh, Rita and Weller, Adrian",
        "SphereFace Revived: Unifying Hyperspherical Face Recognition",
        "IEEE Transactions on Pattern Analysis and Machine Intelligence",
        2022,
        "article",
    ),
    "wen2022sphereface2": Reference(
        "Wen, Yandong and Liu, Weiyang and Weller, Adrian and Raj, Bhiksha and Singh, Rita",
        "SphereFace2: Binary Classification is All You Need for Deep Face Recognition",
        "ICLR",
        2022,
    ),
    "brock2017neural": Reference(
        "Brock, Andrew and Lim, Theodore and Ritchie, James M. and Weston, Nick",
        "Neural Photo Editing with Introspective Adversarial Networks",
        "ICLR",
        2017,
    ),
    "bansal2018can": Reference(
        "Bansal, Nitin and Chen, Xiaohan and Wang, Zhangyang",
        "Can We Gain More from Orthogonality Regularizations in Training Deep Networks?",
        "NeurIPS",
        2018,
    ),
    "lezcano2019cheap": Reference(
        r"Lezcano-Casado, Mario and Mart{\'i}nez-Rubio, David",
        "Cheap Orthogonal Constraints in Neural Networks: A Simple Parametrization of the Orthogonal and Unitary Group",
        "ICML",
        2019,
    ),
    "li2020efficient": Reference(
        "Li, Jun and Li, Fuxin and Todorovic, Sinisa",
        "Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform",
        "ICLR",
        2020,
    ),
    "qiu2023controlling": Reference(
        "Qiu, Zeju and Liu, Weiyang and Feng, Haiwen and Xue, Yuxuan and Feng, Yao and Liu, Zhen and Zhang, Dan "
        r"and Weller, Adrian and Sch{\"o}lkopf, Bernhard",
        "Controlling Text-to-Image Diffusion by Orthogonal Finetuning",
        "NeurIPS",
        2023,
    ),
    "liu2024boft": Reference(
        "Liu, Weiyang and Qiu, Zeju and Feng, Yao and Xiu, Yuliang and Xue, Yuxuan and Yu, Longhui and Feng, Haiwen "
        "and Liu, Zhen and Heo, Juyeon and Peng, Songyou and Wen, Yandong and Black, Michael J. and Weller, Adrian "
        r"and Sch{\"o}lkopf, Bernhard",
        "Parameter-Efficient Orthogonal Finetuning via Butterfly Factorization",
        "ICLR",
        2024,
    ),
    "he2016deep": Reference(
        "He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian",
        "Deep Residual Learning for Image Recognition",
        "CVPR",
        2016,
    ),
    "qi2017pointnet": Reference(
        "Qi, Charles R. and Su, Hao and Mo, Kaichun and Guibas, Leonidas J.",
        "PointNet: Deep Learning on Point Sets for 3D Classification and Segmentation",
        "CVPR",
        2017,
    ),
    "qi2017pointnet2": Reference(
        "Qi, Charles R. and Yi, Li and Su, Hao and Guibas, Leonidas J.",
        "PointNet++: Deep Hierarchical Feature Learning on Point Sets in a Metric Space",
        "NeurIPS",
        2017,
    ),
    "kipf2017semi": Reference(
        "Kipf, Thomas N. and Welling, Max",
        "Semi-Supervised Classification with Graph Convolutional Networks",
        "ICLR",
        2017,
    ),
    "alpaydin1998cascading": Reference(
        "Alpaydin, E. and Kaynak, C.", "Cascading Classifiers", "Kybernetika", 1998, "article"
    ),
    "lecun1998gradient": Reference(
        r"LeCun, Yann and Bottou, L{\'e}on and Bengio, Yoshua and Haffner, Patrick",
        "Gradient-Based Learning Applied to Document Recognition",
        "Proceedings of the IEEE",
        1998,
        "article",
    ),
    "xiao2017fashion": Reference(
        "Xiao, Han and Rasul, Kashif and Vollgraf, Roland",
        "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
        "arXiv preprint arXiv:1708.07747",
        2017,
        "article",
    ),
    "krizhevsky2009learning": Reference(
        "Krizhevsky, Alex",
        "Learning Multiple Layers of Features from Tiny Images",
        "University of Toronto",
        2009,
        "techreport",
    ),
    "lake2015human": Reference(
        "Lake, Brenden M. and Salakhutdinov, Ruslan and Tenenbaum, Joshua B.",
        "Human-Level Concept Learning through Probabilistic Program Induction",
        "Science",
        2015,
        "article",
    ),
    "huang2007labeled": Reference(
        "Huang, Gary B. and Ramesh, Manu and Berg, Tamara and Learned-Miller, Erik",
        "Labeled Faces in the Wild: A Database for Studying Face Recognition in Unconstrained Environments",
        "University of Massachusetts, Amherst",
        2007,
        "techreport",
    ),
    "wu2015shapenets": Reference(
        "Wu, Zhirong and Song, Shuran and Khosla, Aditya and Yu, Fisher and Zhang, Linguang and Tang, Xiaoou "
        "and Xiao, Jianxiong",
        "3D ShapeNets: A Deep Representation for Volumetric Shapes",
        "CVPR",
        2015,
    ),
    "sen2008collective": Reference(
        "Sen, Prithviraj and Namata, Galileo and Bilgic, Mustafa and Getoor, Lise and Galligher, Brian "
        "and Eliassi-Rad, Tina",
        "Collective Classification in Network Data",
        "AI Magazine",
        2008,
        "article",
    ),
    "yang2016revisiting": Reference(
        "Yang, Zhilin and Cohen, William W. and Salakhutdinov, Ruslan",
        "Revisiting Semi-Supervised Learning with Graph Embeddings",
        "ICML",
        2016,
    ),
    "goodfellow2014explaining": Reference(
        "Goodfellow, Ian J. and Shlens, Jonathon and Szegedy, Christian",
        "Explaining and Harnessing Adversarial Examples",
        "arXiv preprint arXiv:1412.6572",
        2014,
        "article",
    ),
    "kurakin2016adversarial": Reference(
        "Kurakin, Alexey and Goodfellow, Ian and Bengio, Samy",
        "Adversarial Machine Learning at Scale",
        "arXiv preprint arXiv:1611.01236",
        2016,
        "article",
    ),
    "moosavi2016deepfool": Reference(
        "Moosavi-Dezfooli, Seyed-Mohsen and Fawzi, Alhussein and Frossard, Pascal",
        "DeepFool: A Simple and Accurate Method to Fool Deep Neural Networks",
        "CVPR",
        2016,
    ),
    "chen2020angular": Reference(
        "Chen, Beidi and Liu, Weiyang and Yu, Zhiding and Kautz, Jan and Shrivastava, Anshumali and Garg, Animesh "
        "and Anandkumar, Animashree",
        "Angular Visual Hardness",
        "ICML",
        2020,
    ),
}
