"""Lightning's own demo modules and data, through every stage as under DDP, with dropout's random numbers; L21."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos.lstm import LightningLSTM, SequenceSampler, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer, WikiText2
from torch import nn
from torch.utils.data import DataLoader, Subset

from tests.harness import assert_same, distributed
from tests.harness.models import AdamW
from tests.strategy.runs import trainer, weights_of, zero3

SHORT = {"limit_train_batches": 5, "limit_val_batches": 3, "limit_test_batches": 3, "limit_predict_batches": 3}


class Narrow(boring.BoringModel):
    """For the data module whose samples have four numbers, from two loaders at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.step(torch.cat(batch))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch)


class Stream(boring.RandomIterableDataset):
    """Other numbers on each rank, which do not depend on who else draws some: we look one batch ahead."""

    def __iter__(self):
        made = torch.Generator().manual_seed(dist.get_rank())
        return (torch.randn(self.size, generator=made) for _ in range(self.count))


class Streams:
    """A data module whose streams are such."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for data in vars(self).values():
            for item in data if isinstance(data, list) else [data]:
                if isinstance(item, boring.RandomIterableDataset):
                    item.__class__ = Stream


class BoringStreams(Streams, boring.BoringDataModuleNoLen):
    pass


class BoringBoth(Streams, boring.IterableBoringDataModule):
    pass


class Demo(boring.DemoModel):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(boring.RandomDataset(32, 64), batch_size=4)


class Images(LightningModule):
    """The convolutional net of the demos, with dropout, in channels_last (E17)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = boring.Net().to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        return -self.net(batch.view(-1, 1, 28, 28)).select(1, 3).mean()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(boring.RandomDataset(28 * 28, 64), batch_size=2)

    def configure_optimizers(self):
        return AdamW(self.parameters(), lr=1e-3)


DEMOS = {
    "boring": (boring.BoringModel, None),
    "boring by hand": (boring.ManualOptimBoringModel, None),
    "boring data": (boring.BoringModel, boring.BoringDataModule),
    "boring streams": (boring.BoringModel, BoringStreams),
    "boring both": (Narrow, BoringBoth),
    "demo": (Demo, None),
    "images": (Images, None),
}


def every_stage(strategy, make_module, make_data) -> list:
    torch.manual_seed(7)
    module, data = make_module(), make_data() if make_data else None
    t = trainer(strategy, max_epochs=2, use_distributed_sampler=not isinstance(module, LightningLSTM), **SHORT)
    t.fit(module, data)
    results = [weights_of(module), t.global_step, t.callback_metrics]
    if isinstance(module, boring.BoringModel):
        results += [t.validate(module, data, verbose=False), t.test(module, data, verbose=False)]
        results += [t.predict(module, data)]
    elif isinstance(module, Text):
        results.append(t.predict(module, module.train_dataloader()))
    return results


@pytest.mark.parametrize("name", DEMOS)
@distributed(world=[2, 3])
def test_demos_run_as_under_ddp(name):
    ours, ddp = (every_stage(s, *DEMOS[name]) for s in (zero3(nn.Linear), "ddp"))
    assert_same(ours, ddp)
    assert ours[1] == 10


TEXT = "the quick brown fox jumps over the lazy dog and runs away from the bear\n" * 40


class Text(LightningTransformer):
    """Lightning's transformer on its reader of WikiText, which reads a text of ours and downloads nothing."""

    def __init__(self, path) -> None:
        super().__init__()
        self.data = WikiText2(path, block_size=9, download=False)
        self.model = Transformer(self.data.vocab_size, ninp=16, nhead=2, nhid=24, nlayers=2, dropout=0.2)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=3)

    def predict_step(self, batch, batch_idx):
        return self(*batch)  # through torch's fused layers, which it has for evaluation only


class Recurrent(LightningLSTM):
    """The LSTM likewise, which carries its hidden state from one batch to the next."""

    def __init__(self, path) -> None:
        super().__init__()
        self.data = WikiText2(path, block_size=9, download=False)
        self.model = SimpleLSTM(self.data.vocab_size, ninp=12, nhid=12, nlayers=2, dropout=0.2)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        mine = Subset(self.data, range(dist.get_rank(), len(self.data), dist.get_world_size()))
        return DataLoader(mine, batch_sampler=SequenceSampler(mine, batch_size=4))


LAYERS = {
    Text: (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.Embedding),
    Recurrent: (nn.LSTM, nn.Embedding),
}


@pytest.mark.parametrize("make", LAYERS, ids=lambda make: make.__name__)
@distributed(world=[2, 3])
def test_language_models_train_as_under_ddp(tmp_path, make):
    (tmp_path / "wikitext-2.txt").write_text(TEXT)
    ours, ddp = (every_stage(s, lambda: make(tmp_path), None) for s in (zero3(*LAYERS[make]), "ddp"))
    assert_same(ours, ddp, rtol=1e-4, atol=1e-5)
