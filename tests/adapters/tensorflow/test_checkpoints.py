"""Checkpoints, Savers and SavedModels; the originals read ours and we read theirs."""

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
pytest.importorskip("keras", reason="keras is not installed")
pytest.importorskip("tf_keras", reason="tf_keras is not installed")

import numpy as np  # noqa: E402
from helpers.tensorflow_optimizers import (  # noqa: E402
    ADAM,
    MOMENTUM,
    OPTIMIZERS,
    state_of,
    value,
    variable,
)

import lossscale.tensorflow as ls  # noqa: E402
from lossscale import from_portable, presets, to_portable  # noqa: E402

v1 = tf.compat.v1
kinds = pytest.mark.parametrize("kind", OPTIMIZERS)


def moved(loss_scale):
    """Take three steps: 8 doubles, halves, and one finite step is counted."""
    for gradient in (1.0, 1.0, np.nan, 1.0):
        loss_scale.update([tf.constant(gradient, tf.float32)])
    return loss_scale


def state(loss_scale):
    return value(loss_scale.current_loss_scale), value(loss_scale.good_steps)


def keys(path):
    return {name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE") for name, _ in path}


def test_a_dynamic_loss_scale_is_saved_under_the_originals_names(folder):
    path = tf.train.Checkpoint(scale=moved(ls.DynamicLossScale(8, 2, 2))).write(
        f"{folder}/c"
    )
    assert {
        "scale/current_loss_scale",
        "scale/good_steps",
        "_CHECKPOINTABLE_OBJECT_GRAPH",
    } == keys(tf.train.list_variables(path))
    other = ls.DynamicLossScale(100, 50, 3)
    tf.train.Checkpoint(scale=other).read(path).assert_consumed()
    assert (8.0, 1) == state(other)
    assert {
        "initial_loss_scale": 100.0,
        "increment_period": 50,
        "multiplier": 3.0,
    } == other.get_config()


def test_a_restore_may_come_before_the_object(folder):
    path = tf.train.Checkpoint(scale=moved(ls.DynamicLossScale(8, 2, 2))).write(
        f"{folder}/c"
    )
    holder = tf.train.Checkpoint()
    status = holder.read(path)
    holder.scale = ls.DynamicLossScale(100, 50, 3)
    status.assert_consumed()
    assert (8.0, 1) == state(holder.scale)


def test_the_originals_checkpoint_loads_into_ours_and_ours_into_the_originals(folder):
    original = v1.mixed_precision.DynamicLossScale
    theirs = moved(original(8, 2, 2))
    path = tf.train.Checkpoint(scale=theirs).write(f"{folder}/theirs")
    ours = ls.DynamicLossScale(100, 2, 2)
    tf.train.Checkpoint(scale=ours).read(path).assert_consumed()
    assert (8.0, 1) == state(ours)
    ours.update([tf.constant(1.0)])
    path = tf.train.Checkpoint(scale=ours).write(f"{folder}/ours")
    again = original(100, 2, 2)
    tf.train.Checkpoint(scale=again).read(path).assert_consumed()
    assert (16.0, 0) == (float(again()), int(again._num_good_steps))


def test_a_manager_is_saved_with_its_three_variables(folder):
    manager = ls.ExponentialUpdateLossScaleManager(8, 2, 3, 2, 0.5)
    for finite in (True, True, False, True):
        manager.update_loss_scale(finite)
    path = tf.train.Checkpoint(manager=manager).write(f"{folder}/c")
    other = ls.ExponentialUpdateLossScaleManager(100, 2, 3, 2, 0.5)
    tf.train.Checkpoint(manager=other).read(path).assert_consumed()
    found = [value(x) for x in (other.loss_scale, other.good_steps, other.bad_steps)]
    assert [16.0, 1, 1] == found
    assert {"bad_steps", "good_steps", "loss_scale"} == {
        name.rpartition("/")[2]
        for name in keys(tf.train.list_variables(path))
        if name.startswith("manager")
    }


def test_a_fixed_scale_has_nothing_to_save(folder):
    fixed, manager = ls.FixedLossScale(8), ls.FixedLossScaleManager(8)
    path = tf.train.Checkpoint(a=fixed, b=manager).write(f"{folder}/c")
    assert {"_CHECKPOINTABLE_OBJECT_GRAPH"} == keys(tf.train.list_variables(path))


@pytest.mark.parametrize("kind", ["manager", "loss scale"])
def test_a_saver_of_tensorflow_1_finds_the_variables_by_name(folder, kind):
    def build():
        if kind == "manager":
            made = ls.ExponentialUpdateLossScaleManager(8, 1, 1, 2, 0.5)
            return made.get_loss_scale(), made.update_loss_scale(tf.constant(True))
        made = ls.DynamicLossScale(8, 1, 2)
        return made(), made.update([tf.constant(1.0)])[0]

    with tf.Graph().as_default(), v1.Session() as session:
        _, update = build()
        session.run(v1.global_variables_initializer())
        session.run(update)
        path = v1.train.Saver().save(session, f"{folder}/model")
    with tf.Graph().as_default(), v1.Session() as session:
        scale, update = build()
        v1.train.Saver().restore(session, path)
        assert 16.0 == session.run(scale)
        session.run(update)
        assert 32.0 == session.run(scale)


def trained(kind, optimizers, gradients, scale=None):
    """Return a weight and an optimizer after some steps, in a checkpoint."""
    weight = variable(kind, 10.0)
    loss_scale = scale or ls.DynamicLossScale(8, 2, 2)
    optimizer = ls.LossScaleOptimizer(optimizers[kind](0.5), loss_scale)
    for gradient in gradients:
        take(optimizer, weight, gradient)
    holder = tf.train.Checkpoint(optimizer=optimizer)
    holder.weight = weight.value if kind == "keras 3" else weight
    return holder, weight, optimizer


def take(optimizer, weight, gradient):
    optimizer.apply_gradients([(tf.constant(gradient, tf.float32), weight)])


@kinds
@pytest.mark.parametrize("optimizers", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    folder, kind, optimizers
):
    before, after = (1.0, 2.0, np.nan, 1.0), (3.0, np.inf, 1.0)
    holder, weight, optimizer = trained(kind, optimizers, before)
    path = holder.write(f"{folder}/c")
    for gradient in after:
        take(optimizer, weight, gradient)
    expected = value(weight), state(optimizer.loss_scale), state_of(optimizer)
    holder, weight, optimizer = trained(kind, optimizers, (9.0,))
    holder.read(path).assert_existing_objects_matched()
    for gradient in after:
        take(optimizer, weight, gradient)
    found = value(weight), state(optimizer.loss_scale), state_of(optimizer)
    assert expected == found


def test_the_checkpoint_of_the_original_test():
    """After one step scale 1 and count 1; another gives 2 and 0; then back."""
    holder, weight, optimizer = trained(
        "v1", OPTIMIZERS, (1.0,), ls.DynamicLossScale(1, 2, 2)
    )
    assert (1.0, 1) == state(optimizer.loss_scale)
    manager = tf.train.CheckpointManager(
        holder, tf.io.gfile.join("ram://", "checkpoints"), max_to_keep=1
    )
    manager.save()
    take(optimizer, weight, 1.0)
    assert (2.0, 0) == state(optimizer.loss_scale)
    holder.restore(manager.latest_checkpoint).assert_consumed()
    assert (1.0, 1) == state(optimizer.loss_scale)


def test_the_keys_are_those_of_the_original_wrapper(folder):
    def written(wrapper, scale, name):
        weight = tf.Variable(1.0)
        optimizer = wrapper(v1.train.MomentumOptimizer(1.0, 0.9), scale)
        optimizer.apply_gradients([(tf.constant(1.0), weight)])
        holder = tf.train.Checkpoint(opt=optimizer, v=weight)
        return holder, weight, optimizer, holder.write(f"{folder}/{name}")

    original = v1.mixed_precision.MixedPrecisionLossScaleOptimizer
    their_scale = v1.mixed_precision.DynamicLossScale(8, 1, 2)
    theirs = written(original, their_scale, "theirs")
    our_scale = ls.DynamicLossScale(32, 1, 2)
    ours = written(ls.MixedPrecisionLossScaleOptimizer, our_scale, "ours")
    their_keys, our_keys = (keys(tf.train.list_variables(x[3])) for x in (theirs, ours))
    assert their_keys == our_keys
    assert "v/.OPTIMIZER_SLOT/opt/base_optimizer/momentum" in our_keys
    ours[0].read(theirs[3]).assert_consumed()
    assert 16.0 == float(our_scale())
    ours[2].apply_gradients([(tf.constant(1.0), ours[1])])
    # From weight 0 and momentum 1: the momentum becomes 1.9.
    assert float(np.float32(0) - np.float32(1.9)) == float(ours[1])
    theirs[0].read(ours[3]).assert_consumed()
    assert 64.0 == float(their_scale())


def test_checkpoints_of_the_tf_keras_wrapper_and_of_ours_are_exchanged(folder):
    import tf_keras

    weight = tf.Variable(1.0)
    theirs = tf_keras.mixed_precision.LossScaleOptimizer(
        tf_keras.optimizers.SGD(1.0, momentum=0.5), initial_scale=8.0
    )
    theirs.get_scaled_loss(tf.constant(1.0))
    theirs.get_unscaled_gradients([tf.constant(1.0)])
    for gradient in (1.0, np.nan, 1.0):
        theirs.apply_gradients([(tf.constant(gradient, tf.float32), weight)])
    path = tf.train.Checkpoint(opt=theirs).write(f"{folder}/c")
    ours = ls.LossScaleOptimizer(
        tf_keras.optimizers.SGD(1.0, momentum=0.5), ls.DynamicLossScale()
    )
    ours.inner_optimizer.build([weight])
    tf.train.Checkpoint(opt=ours).read(path).assert_consumed()
    assert (4.0, 1) == state(ours.loss_scale)
    assert 3 == value(ours.iterations)
    ours.apply_gradients([(tf.constant(1.0), weight)])
    path = tf.train.Checkpoint(opt=ours).write(f"{folder}/d")
    tf.train.Checkpoint(opt=theirs).read(path).assert_consumed()
    assert (4, 2) == (value(theirs.iterations), value(theirs.dynamic_counter))


@kinds
def test_a_training_step_goes_through_a_saved_model(folder, kind):
    class Trainer(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = variable(kind, 10.0)
            self.scale = ls.DynamicLossScale(8, 2, 2)
            self.optimizer = ls.LossScaleOptimizer(MOMENTUM[kind](1.0), self.scale)

        @tf.function(input_signature=[tf.TensorSpec((), tf.float32)])
        def step(self, gradient):
            self.optimizer.apply_gradients([(1.0 * gradient, self.weight)])
            return tf.stack([tf.convert_to_tensor(self.weight), self.scale()])

    gradients = (1.0, np.nan, 1.0, 1.0, np.inf, 1.0)
    trainer = Trainer()
    expected = [trainer.step(tf.constant(x, tf.float32)) for x in gradients[:2]]
    tf.saved_model.save(trainer, f"{folder}/model")
    expected += [trainer.step(tf.constant(x, tf.float32)) for x in gradients[2:]]
    assert [
        [9.0, 8.0],
        [9.0, 4.0],
        [7.5, 4.0],
        [5.75, 8.0],
        [5.75, 4.0],
        [3.875, 4.0],
    ] == [x.numpy().tolist() for x in expected]
    loaded = tf.saved_model.load(f"{folder}/model")
    found = [loaded.step(tf.constant(x, tf.float32)) for x in gradients[2:]]
    assert [x.numpy().tolist() for x in expected[2:]] == [
        x.numpy().tolist() for x in found
    ]


def test_a_state_saved_in_tensorflow_loads_elsewhere():
    import lossscale.numpy as other

    policy = presets.get("tensorflow", init_scale=8.0, growth_interval=2)
    from lossscale import Signal

    after = ls.update(policy, ls.init(policy), Signal(tf.constant(True)))
    same, plain = from_portable(to_portable(policy, after))
    assert policy == same
    assert (8.0, 1, 0) == tuple(x.item() for x in other.init(same, plain))


def test_configs_make_the_same_object_without_its_state():
    loss_scale = moved(ls.DynamicLossScale(8, 2, 2))
    again = ls.DynamicLossScale.from_config(loss_scale.get_config())
    assert (8.0, 0) == state(again)
    assert loss_scale.get_config() == again.get_config()
    fixed = ls.FixedLossScale.from_config(ls.get(123).get_config())
    assert 123.0 == float(fixed())
    with pytest.raises(TypeError):
        ls.DynamicLossScale.from_config({"growth": 2})
