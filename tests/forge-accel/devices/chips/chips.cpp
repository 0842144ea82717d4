// Devices npu, hpu, xpu and mps without their chips: tensors with the device's own type and keys, memory and arithmetic of the CPU.
//
// Every operation runs on the CPU's kernel, on the same memory with the same strides, so a run's numbers are the CPU's bit for
// bit. What a chip refuses is refused here: a tensor of the CPU beside one of the chip, and float64 on mps.
// torch calls the type of an out-of-tree device PrivateUse1; torch_npu renames it npu.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/detail/MPSHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <limits>
#include <string>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

constexpr DeviceIndex kDevices = 2;
constexpr std::array<DeviceType, 4> kKinds = {DeviceType::PrivateUse1, DeviceType::HPU, DeviceType::XPU, DeviceType::MPS};

std::atomic<int64_t> held_bytes{0}, peak_bytes{0}, operations{0};
thread_local DeviceIndex current = 0;

bool is_chip(const at::Tensor& tensor) {
  return tensor.defined() && std::find(kKinds.begin(), kKinds.end(), tensor.device().type()) != kKinds.end();
}

DispatchKeySet keys_of(DeviceType kind) {
  switch (kind) {
    case DeviceType::HPU: return DispatchKeySet(DispatchKey::HPU);
    case DeviceType::XPU: return DispatchKeySet(DispatchKey::XPU);
    case DeviceType::MPS: return DispatchKeySet(DispatchKey::MPS);
    default: return DispatchKeySet(DispatchKey::PrivateUse1);
  }
}

// ---- memory: the CPU's, counted

struct Held {
  c10::DataPtr data;
  c10::Storage storage;
  int64_t bytes;
};

void release(void* context) {
  auto* held = static_cast<Held*>(context);
  held_bytes -= held->bytes;
  delete held;
}

Held* hold(c10::DataPtr data, c10::Storage storage, size_t bytes) {
  auto* held = new Held{std::move(data), std::move(storage), static_cast<int64_t>(bytes)};
  const int64_t now = held_bytes += held->bytes;
  int64_t before = peak_bytes;
  while (before < now && !peak_bytes.compare_exchange_weak(before, now)) {
  }
  return held;
}

struct ChipAllocator final : c10::Allocator {
  explicit ChipAllocator(DeviceType kind) : kind(kind) {}
  c10::DataPtr allocate(size_t bytes) override {
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    void* at = data.get();
    return {at, hold(std::move(data), {}, bytes), &release, Device(kind, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  DeviceType kind;
};

ChipAllocator* allocator_of(DeviceType kind) {
  static std::array<ChipAllocator*, 4> all = {
      new ChipAllocator(kKinds[0]), new ChipAllocator(kKinds[1]), new ChipAllocator(kKinds[2]), new ChipAllocator(kKinds[3])};
  return all[std::find(kKinds.begin(), kKinds.end(), kind) - kKinds.begin()];
}

const bool allocators_set = [] {
  for (auto kind : kKinds) {
    c10::SetAllocator(kind, allocator_of(kind));
  }
  return true;
}();

// ---- tensors: the same memory under the other device

at::Tensor made(c10::Storage storage, DispatchKeySet keys, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The chip's memory as a tensor of the CPU, which does not own it.
at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  auto seen = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), Device(DeviceType::CPU)),
      c10::GetCPUAllocator(),
      /*resizable=*/true);
  return made(c10::Storage(std::move(seen)), DispatchKeySet(DispatchKey::CPU), tensor);
}

c10::Storage taken_over(const c10::Storage& storage, Device device) {
  auto* held = hold({}, storage, storage.nbytes());
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), held, &release, device),
      allocator_of(device.type()),
      /*resizable=*/true));
}

at::Tensor on_chip(const at::Tensor& result, Device device) {
  if (!result.defined() || is_chip(result)) {
    return result;
  }
  TORCH_CHECK_TYPE(
      device.type() != DeviceType::MPS || result.scalar_type() != at::kDouble,
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 instead.");
  return made(taken_over(result.storage(), device), keys_of(device.type()), result);
}

// What an operation did to the alias of a tensor that it may write: new sizes, and new memory where it grew.
void write_back(const at::Tensor& tensor, const at::Tensor& alias) {
  if (alias.storage().data() != tensor.storage().data() || alias.storage().nbytes() != tensor.storage().nbytes()) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto* held = hold({}, alias.storage(), alias.storage().nbytes());
    storage->set_data_ptr_noswap(
        c10::DataPtr(const_cast<void*>(alias.storage().data()), held, &release, tensor.device()));
    storage->set_nbytes(alias.storage().nbytes());
  }
  if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides()) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
}

// ---- operations

void check_together(const c10::OperatorHandle& op, const at::Tensor& tensor, std::optional<Device>& device) {
  if (!tensor.defined()) {
    return;
  }
  if (is_chip(tensor)) {
    TORCH_CHECK(
        !device || *device == tensor.device(),
        "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", tensor.device(),
        "! (", op.schema().name(), ")");
    device = tensor.device();
  }
}

void run_on_cpu(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  ++operations;
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  std::vector<IValue> given(stack->begin() + begin, stack->end());
  std::optional<Device> device;
  for (auto& value : given) {
    if (value.isTensor()) {
      check_together(op, value.toTensor(), device);
    } else if (value.isTensorList()) {
      for (const at::Tensor& each : value.toTensorVector()) {
        check_together(op, each, device);
      }
    }
  }
  for (size_t at = 0; at < count; ++at) {
    auto& value = given[at];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (is_chip(tensor)) {
        (*stack)[begin + at] = on_cpu(tensor);
      } else if (tensor.defined() && device) {
        TORCH_CHECK(
            tensor.dim() == 0,
            "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (",
            schema.name(), ", argument ", schema.arguments()[at].name(), ")");
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> aliases;
      for (const at::Tensor& each : value.toTensorVector()) {
        TORCH_CHECK(
            !each.defined() || is_chip(each) || each.dim() == 0 || !device,
            "Expected all tensors to be on the same device, but found at least two devices in ", schema.name(), "!");
        aliases.push_back(is_chip(each) ? on_cpu(each) : each);
      }
      (*stack)[begin + at] = std::move(aliases);
    } else if (value.isOptionalTensorList()) {
      // Indices, which may be the CPU's: a chip copies them.
      c10::List<std::optional<at::Tensor>> aliases;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
        aliases.push_back(each && is_chip(*each) ? std::optional<at::Tensor>(on_cpu(*each)) : each);
      }
      (*stack)[begin + at] = std::move(aliases);
    } else if (value.isDevice() && value.toDevice().type() != DeviceType::CPU) {
      device = device ? device : value.toDevice();
      (*stack)[begin + at] = Device(DeviceType::CPU);
    }
  }
  std::vector<IValue> aliases(stack->begin() + begin, stack->end());
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  const Device where = device.value_or(Device(DeviceType::PrivateUse1, current));
  for (size_t at = 0; at < count; ++at) {
    const auto* info = schema.arguments()[at].alias_info();
    if (info != nullptr && info->isWrite() && given[at].isTensor() && is_chip(given[at].toTensor())) {
      write_back(given[at].toTensor(), aliases[at].toTensor());
    }
  }
  const auto& returns = schema.returns();
  const size_t first = stack->size() - returns.size();
  for (size_t at = 0; at < returns.size(); ++at) {
    auto& value = (*stack)[first + at];
    const at::Tensor* source = nullptr;
    const auto* info = returns[at].alias_info();
    if (info != nullptr) {
      for (size_t argument = 0; argument < count; ++argument) {
        const auto* own = schema.arguments()[argument].alias_info();
        if (own != nullptr && own->beforeSets() == info->beforeSets() && given[argument].isTensor()) {
          source = &given[argument].toTensor();
        }
      }
    }
    const bool itself = info != nullptr && info->isWrite() && source != nullptr;
    const auto back = [&](const at::Tensor& result) {
      if (source != nullptr && is_chip(*source)) {
        return itself ? *source : made(c10::Storage(source->storage()), keys_of(where.type()), result);
      }
      return itself ? *source : on_chip(result, where);
    };
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& each : value.toTensorVector()) {
        results.push_back(back(each));
      }
      value = std::move(results);
    }
  }
}

DeviceType kind_of(DispatchKeySet keys) {
  for (auto kind : kKinds) {
    if (keys.has_any(keys_of(kind))) {
      return kind;
    }
  }
  return DeviceType::PrivateUse1;
}

at::ScalarType dtype_of(const IValue& value, DeviceType kind) {
  const auto dtype = value.isNone() ? at::typeMetaToScalarType(c10::get_default_dtype()) : value.toScalarType();
  TORCH_CHECK_TYPE(
      kind != DeviceType::MPS || dtype != at::kDouble,
      "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 instead.");
  return dtype;
}

struct On {
  explicit On(const IValue& device) : before(current) {
    if (device.isDevice() && device.toDevice().has_index()) {
      current = device.toDevice().index();
    }
  }
  ~On() { current = before; }
  DeviceIndex before;
};

DeviceType kind_of(const IValue& device, DispatchKeySet keys) {
  return device.isDevice() ? device.toDevice().type() : kind_of(keys);
}

// empty.memory_format(SymInt[] size, *, dtype, layout, device, pin_memory, memory_format)
void empty(const c10::OperatorHandle&, DispatchKeySet keys, Stack* stack) {
  const auto last = torch::jit::last(*stack, 6);
  const On on(last[3]);
  const auto kind = kind_of(last[3], keys);
  const auto format = last[5].isNone() ? std::optional<at::MemoryFormat>() : last[5].toMemoryFormat();
  auto made_ = at::detail::empty_generic(
      last[0].toIntVector(), allocator_of(kind), keys_of(kind), dtype_of(last[1], kind), format);
  torch::jit::drop(*stack, 6);
  stack->emplace_back(at::Tensor(std::move(made_)));
}

// empty_strided(SymInt[] size, SymInt[] stride, *, dtype, layout, device, pin_memory)
void empty_strided(const c10::OperatorHandle&, DispatchKeySet keys, Stack* stack) {
  const auto last = torch::jit::last(*stack, 6);
  const On on(last[4]);
  const auto kind = kind_of(last[4], keys);
  auto made_ = at::detail::empty_strided_generic(
      last[0].toIntVector(), last[1].toIntVector(), allocator_of(kind), keys_of(kind), dtype_of(last[2], kind));
  torch::jit::drop(*stack, 6);
  stack->emplace_back(at::Tensor(std::move(made_)));
}

// _copy_from(Tensor self, Tensor dst, bool non_blocking): between devices, or within one.
void copy_from(const c10::OperatorHandle&, DispatchKeySet, Stack* stack) {
  const auto last = torch::jit::last(*stack, 3);
  const at::Tensor source = last[0].toTensor(), target = last[1].toTensor();
  const auto to = is_chip(target) ? on_cpu(target) : target;
  to.copy_(is_chip(source) ? on_cpu(source) : source);
  torch::jit::drop(*stack, 3);
  stack->emplace_back(target);
}

// copy_(Tensor(a!) self, Tensor src, bool non_blocking)
void copy(const c10::OperatorHandle&, DispatchKeySet, Stack* stack) {
  const auto last = torch::jit::last(*stack, 3);
  const at::Tensor target = last[0].toTensor(), source = last[1].toTensor();
  (is_chip(target) ? on_cpu(target) : target).copy_(is_chip(source) ? on_cpu(source) : source);
  torch::jit::drop(*stack, 3);
  stack->emplace_back(target);
}

// set_.source_Storage_storage_offset(Tensor(a!) self, Storage source, SymInt offset, SymInt[] size, SymInt[] stride)
void set_storage(const c10::OperatorHandle&, DispatchKeySet, Stack* stack) {
  const auto last = torch::jit::last(*stack, 5);
  const at::Tensor self = last[0].toTensor();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(last[1].toStorage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(last[3].toIntVector(), last[4].toIntVector(), last[2].toInt());
  torch::jit::drop(*stack, 5);
  stack->emplace_back(self);
}

// set_.source_Storage(Tensor(a!) self, Storage source)
void set_whole_storage(const c10::OperatorHandle&, DispatchKeySet, Stack* stack) {
  const auto last = torch::jit::last(*stack, 2);
  const at::Tensor self = last[0].toTensor();
  const auto storage = last[1].toStorage();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  const auto numbers = static_cast<int64_t>(storage.nbytes() / self.element_size());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef{numbers}, at::IntArrayRef{1}, 0);
  torch::jit::drop(*stack, 2);
  stack->emplace_back(self);
}

// set_.source_Tensor(Tensor(a!) self, Tensor source)
void set_tensor(const c10::OperatorHandle&, DispatchKeySet, Stack* stack) {
  const auto last = torch::jit::last(*stack, 2);
  const at::Tensor self = last[0].toTensor(), source = last[1].toTensor();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  torch::jit::drop(*stack, 2);
  stack->emplace_back(self);
}

// scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, *, scale, enable_gqa): the plain way, since this
// torch has not the code with which XPU and MPS choose a kernel.
void plain_attention(const c10::OperatorHandle&, DispatchKeySet, Stack* stack) {
  auto& mask = (*stack)[stack->size() - 5];
  if (mask.isTensor() && mask.toTensor().scalar_type() == at::kBool) {
    const auto& seen = mask.toTensor();
    const auto dtype = (*stack)[stack->size() - 8].toTensor().scalar_type();
    mask = seen.to(dtype).zero_().masked_fill_(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }
  stack->insert(stack->end() - 2, IValue());  // dropout_mask
  c10::Dispatcher::singleton().findSchemaOrThrow("aten::_scaled_dot_product_attention_math", "").callBoxed(stack);
  stack->pop_back();  // the weights
}

void register_attention(torch::Library& library) {
  library.impl("scaled_dot_product_attention", torch::CppFunction::makeFromBoxedFunction<&plain_attention>());
}

void register_operations(torch::Library& library) {
  library.impl("empty.memory_format", torch::CppFunction::makeFromBoxedFunction<&empty>());
  library.impl("empty_strided", torch::CppFunction::makeFromBoxedFunction<&empty_strided>());
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  library.impl("_copy_from", torch::CppFunction::makeFromBoxedFunction<&copy_from>());
  library.impl("set_.source_Storage_storage_offset", torch::CppFunction::makeFromBoxedFunction<&set_storage>());
  library.impl("set_.source_Storage", torch::CppFunction::makeFromBoxedFunction<&set_whole_storage>());
  library.impl("set_.source_Tensor", torch::CppFunction::makeFromBoxedFunction<&set_tensor>());
  // For convolutions torch asks a vendor's own functions, whose names are of no operation of the CPU; layer norms of other devices
  // are a formula.
  for (const auto* name : {"convolution", "convolution_backward", "native_layer_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  // Where the CPU has a kernel and other devices are given a formula of several operations, take the CPU's kernel: the formula
  // rounds otherwise (silu_backward).
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (op && op->hasSchema() && name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd)) {
      const auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
  }
}

// ---- devices

struct Guard final : c10::impl::DeviceGuardImplInterface {
  explicit Guard(DeviceType kind) : kind(kind) {}
  DeviceType type() const override { return kind; }
  Device exchangeDevice(Device device) const override {
    const Device before(kind, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {kind, current}; }
  void setDevice(Device device) const override {
    if (device.has_index()) {
      TORCH_CHECK(device.index() < kDevices, "there are ", int(kDevices), " devices, and no ", device);
      current = device.index();
    }
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) {
      current = device.index();
    }
  }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  DeviceType kind;
};

const bool guards_set = [] {
  for (auto kind : kKinds) {
    new c10::impl::DeviceGuardImplRegistrar(kind, new Guard(kind));
  }
  return true;
}();

// torch takes one kind of accelerator a process for its own: the kind in use. PrivateUse1, once it is registered, stays.
std::atomic<DeviceType> in_use{DeviceType::CPU};

template <class Base, DeviceType kind>
struct HooksOf : Base {
  bool isBuilt() const override { return in_use == kind; }
  bool isAvailable() const override { return in_use == kind; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  // No memory is pinned here, but it may be asked for.
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
};

struct NPUHooks final : HooksOf<at::PrivateUse1HooksInterface, DeviceType::PrivateUse1> {};

struct HPUHooks final : HooksOf<at::HPUHooksInterface, DeviceType::HPU> {
  explicit HPUHooks(at::HPUHooksArgs) {}
  bool hasHPU() const override { return in_use == DeviceType::HPU; }
};

struct XPUHooks final : HooksOf<at::XPUHooksInterface, DeviceType::XPU> {
  bool hasXPU() const override { return in_use == DeviceType::XPU; }
};

struct MPSHooks final : HooksOf<at::MPSHooksInterface, DeviceType::MPS> {
  bool hasMPS() const override { return in_use == DeviceType::MPS; }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(HPUHooksRegistry, HPUHooks, HPUHooks)
C10_REGISTER_CLASS(XPUHooksRegistry, XPUHooks, XPUHooks)
C10_REGISTER_CLASS(MPSHooksRegistry, MPSHooks, MPSHooks)
}  // namespace at

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, HPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, XPU, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, MPS, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastHPU, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_operations(m); }
TORCH_LIBRARY_IMPL(aten, HPU, m) { register_operations(m); }
TORCH_LIBRARY_IMPL(aten, XPU, m) { register_operations(m); }
TORCH_LIBRARY_IMPL(aten, MPS, m) { register_operations(m); }
TORCH_LIBRARY_IMPL(aten, AutogradXPU, m) { register_attention(m); }
TORCH_LIBRARY_IMPL(aten, AutogradMPS, m) { register_attention(m); }

extern "C" {
int64_t chips_held_bytes() { return held_bytes; }
int64_t chips_peak_bytes() { return peak_bytes; }
int64_t chips_operations() { return operations; }
void chips_reset_peak() { peak_bytes = held_bytes.load(); }
int chips_device() { return current; }
void chips_use(int kind) {
  in_use = kKinds[kind];
  if (in_use == DeviceType::PrivateUse1 && !at::isPrivateUse1HooksRegistered()) {
    at::RegisterPrivateUse1HooksInterface(new NPUHooks());
  }
}
void chips_set_device(int device) { current = static_cast<DeviceIndex>(device); }
}
