"""The lines of small stateful programs, and of changes from outside."""

from __future__ import annotations

INSIDE = """
s.p.count += 1; y = y + s.p.count
s.p = dataclasses.replace(s.p, rate=s.p.rate * 0.5)
y = y * s.p.rate
s.p.kept.append(y.detach())
y = y + s.slotted.value if hasattr(s.slotted, 'value') else y
s.slotted.value = x * 0.5
y = s.member(y)
y = y + s.base_only
for group in opt.param_groups: group['lr'] = max(group['lr'] * 0.5, 0.01)
y = y + round(opt2.param_groups[0]['lr'], 3)
sched.step()
y = y + len(os.getenv('MONARCH_STATEFUL', ''))
s.g = {**s.g, s.k: y.detach()} if len(s.g) < 3 else {}
y = y + s.on.value
s.on = Mode.B if s.on is Mode.A else Mode.A
s.a, alias = s.a.clone(), s.a; alias.add_(1)
s.b = s.a[:2].sum() + s.b
y, s.c = s.outer_member(y)
s.cached.cache_clear() if s.flag else None; y = y * s.cached(2)
s.a = s.a * 0.5 + x
s.b = s.a + 1
s.a, s.b = s.b, s.a
s.k += 1
y = y * s.k
y = y + s.twice
y = y + 1 if s.flag else y
s.flag = not s.flag
s.f = s.f * 0.5
s.t.append(y.detach())
y = y + s.t[-1] if s.t else y
s.t = s.t[-2:]
y = y + len(s.t)
s.d['u'] = y * 0.5
y = y + s.d.get('u', 0.0)
s.d.pop('u', None)
s.d = {**s.d, str(s.k % 2): x}
y = y + sum(s.d.values())
G += 1
y = helper(y)
GT = GT * 0.5 + y.detach()
y = y + GT
n = n * 0.5 + y.detach()
y = y + n
s.a.add_(x)
s.b.mul_(0.5)
s.a.data = s.a.data * 0.5
y = s.apply(y)
y = inner(y)
y = y + s.o.z * s.o.scale
s.o = Other(0.25)
s.o.scale = s.k * 0.5
s.c = x
s.c = y
y = y + s.c if s.c is not None else y
S.count += 1
y = y * S.count
y = y + 1 if s.a is s.b else y
y = y + getattr(s, 'ab'[int(s.k) % 2])
setattr(s, 'xy'[int(s.k) % 2], s.k)
y = y + 1 if hasattr(s, 'x') else y
opt.zero_grad(); net(y.detach()).square().mean().backward(); opt.step()
y = y + net(x).detach()
y = y + 0.1 * net.weight.grad.sum() if net.weight.grad is not None else y
net.train(not net.training)
y = y * 2 if net.training else y
s.t.insert(0, s.b)
s.t.clear()
s.q.append(x)
y = y + sum(s.q)
s.e = s.e | {s.k % 3}
y = y * len(s.e)
s.n = None if s.n is not None else x * 2
y = y + (s.n if s.n is not None else 1)
y = y * registry.get('a')
registry.scale = registry.scale * 0.5
registry['b'] = y.detach()
registry = type(registry)(registry, a=3.0); registry.scale = 2.0
record.value = record.value * 0.5
y = y * record.value
record.parts.append(x)
y = y + sum(record.parts[-2:])
y = half(y)
half = functools.partial(getattr(half, 'func', half), by=s.f)
for each in (net, net2): y = y + each(x).detach()
opt2.zero_grad(); (net(x) * net2(x)).sum().backward(); opt2.step()
torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
opt.param_groups[0]['lr'] *= 0.5
y = y + opt.param_groups[0]['lr']
for value in list(s.d.values()): y = y + value
s.t += [x, y.detach()]
s.t[:] = s.t[:1]
y = y + getattr(s, 'missing', 1)
s.a, s.t = (s.t[0] if s.t else s.a), [s.a]
y = y + (lambda: s.f)()
with torch.no_grad(): net2.weight.mul_(0.5)
net2.weight.grad = None
S.late = s.f
y = y + getattr(S, 'late', 0.0)
y = y + x.requires_grad
s.w = weakref.ref(s.o); y = y * s.w().scale
y = y + 1 if s.w() is s.o else y
s.dd['u'].append(y.detach()); y = y + s.dd['u'][-1]
s.dd[s.k % 2] += [x]; y = y * len(s.dd)
s.ct['a'] += 1; y = y * s.ct['a']
s.ct.update('ab'); y = y + s.ct.most_common(1)[0][1]
s.od['b'] = x; s.od.move_to_end('a'); y = y + next(iter(s.od.values()))
s.od.popitem(last=False); s.od[str(s.k)] = y.detach(); y = y * len(list(s.od))
s.pt = s.pt._replace(v=s.pt.v * 0.5 + x); y = y + s.pt.v * s.pt.n
s.pt = Point(s.pt.v, s.pt.n + 1)
y = y + next(s.gen)
y = y * next(s.it)
y = y + CV.get()
CV.set(CV.get() + 1)
s.fl = s.fl | Flags.B; y = y * s.fl.value
y = y + 1 if Flags.A in s.fl else y
s.fl ^= Flags.A
for function in s.fs[-2:]: y = function(y)
s.fs = [(lambda y, i=i: y + i * s.f) for i in range(2)]
s.fs.append((lambda z: lambda y: y + z)(y.detach()))
y = caught(y)
y = by_default(y)
y = y + s.lazy.made + s.lazy.auto_scale
s.lazy.size = s.lazy.size * 0.5
s.lazy.__dict__.pop('made', None)
y = s.lazy(y) + len(s.lazy)
Lazy.add(y.detach()); y = y + Lazy.shared[-1]
s.ns.v *= 0.5; y = y * s.ns.v
s.ns = types.SimpleNamespace(v=y.detach().sum())
s.ch['a'] = s.ch['a'] + 1; y = y + s.ch['a']
s.ar.append(s.f); y = y + s.ar[-1] + len(s.ar)
s.by[0] += 1; y = y + s.by[0] * 0.01
del s.d; s.d = {'v': x}
y = y + deep(x).detach()
dopt.zero_grad(); deep(x).square().sum().backward(); dopt.step()
deep.two[0], deep.one = deep.one, deep.two[0]
deep.norm.eval()
deep.train(not deep.training)
deep.norm.momentum = s.f * 0.5
deep.norm.reset_running_stats()
y = y + deep.norm.running_mean + deep.norm.num_batches_tracked
deep.seen.add_(y.detach()); y = y + deep.seen
deep.scale = deep.scale * 0.5
dopt.param_groups[1]['weight_decay'] = s.f
dopt.param_groups.reverse()
handle = net.register_forward_hook(lambda module, args, out: out * s.f); y = y + net(x).detach(); handle.remove()
hook.remove()
z = net(x); z.register_hook(lambda grad: grad * 0.5); z.sum().backward()
s.a[:2].mul_(0.5)
s.a[0] = s.f
view = s.a.view(3, 1); view.add_(1.0); y = y + view[:, 0]
s.a.unsqueeze(0).expand(2, 3)[0].add_(1.0) if False else None; y = y + s.a.unsqueeze(0).expand(2, 3).sum(0)
torch.nn.init.constant_(net.bias, s.f)
net.bias.requires_grad_(not net.bias.requires_grad)
z = s.a.detach().clone().requires_grad_(); (z * z).sum().backward(); y = y + z.grad
s.g2 = torch.autograd.grad(net(x).sum(), net.weight)[0]; y = y + s.g2.sum(0)
y = y.double().float()
s.a = s.a.double()
y = y + s.a.to(y.dtype)
s.i = s.i + 1; y = y * s.i
s.i.add_(s.k)
y = y + (torch.rand_like(y) < 2.0).to(y.dtype)
y = torch.nn.functional.dropout(y, 0.0) + 0 * torch.randn(3)
y = y + (net.weight.grad is None) + len(opt.state)
opt.zero_grad(set_to_none=False)
opt.state.clear()
for name, parameter in net.named_parameters(): y = y + parameter.detach().sum() * len(name)
y = y + sum(getattr(s, each).sum() for each in ('a', 'b'))
y = y + functools.reduce(lambda a, b: a + b, [s.a, x], s.f)
y, *rest = (y, *s.t[:1]); y = y + len(rest)
s.t, s.d = [*s.t, s.t][:1], {**s.d}
y = nested(y)
y = within_nested(y) * 0.5
y = y + (s.left if s.left is not None else 0)
y = y + sum(s.box.get('a', ()))
y = y + trainer.fit(x)
y = trainer.predict(y)
trainer, trainer2 = trainer2, trainer
y = y + sum(each.steps for each in (trainer, trainer2))
y = y + trainer.best.get(1, 0.0) + len(trainer2.history)
for each in (trainer, trainer2): each.fit(y.detach())
trainer.opt.param_groups[0]['lr'] *= 0.5
trainer.model.weight.data.mul_(0.5)
for each in s.loops: y = each(y)
s.loops = s.loops[::-1]
s.loops[0].__defaults__ = (s.k,)
watched.value = s.k
y = y + len(watched.log) * 0.1
y = y + 1 if watched == 1 else y
y = y + sum(watched)
del watched.log[1:]
s.dies = Dies()
s.dies = None
z = net(x); z.register_hook(tapped); z.sum().backward()
y = y + sum(s.taps)
net.weight.register_hook(tapped) if not net.weight._backward_hooks else None; net(x).sum().backward()
opt._optimizer_step_pre_hooks or opt.register_step_pre_hook(before_step); net(x).sum().backward(); opt.step()
h = net.register_full_backward_hook(lambda m, i, o: setattr(s, 'x', s.k)); net(x).sum().backward(); h.remove()
s.m2 = s.m2.t().contiguous().t()
s.m2.t()[0].add_(1)
s.m2.view(6)[1:3].mul_(s.f)
y = y + s.m2.sum(0) * s.m2.stride(0) + s.m2.is_contiguous()
s.m2 = s.m2.transpose(0, 1).reshape(2, 3)
s.m2[s.k % 2] = y.detach()
s.m2 = torch.stack([s.m2[1], s.m2[0]])
y = y + s.m2[-1]
s.m2.t_().t_()
row = s.m2[0]; row += 1; y = y + row
s.vi = s.a[1:]
s.vi.add_(1)
s.vi = s.vi * 0.5
y = y + s.vi.sum()
s.a = s.vi[0].expand(3)
s.vi = s.a.detach()
s.vi = s.a.view(3)
s.a = s.a.clone()
s.vi, s.a = s.a.view_as(s.a), s.a
s.b.copy_(s.a); y = y + s.b
s.b = torch.add(s.a, 1, out=s.b)
y = y + s.pl
s.pl.add_(1); y = y + s.pl
s.pl = s.pl * 0.5
s.pl = s.pl.clone(); s.pl[0] = s.k
s.nest['a'][0] = s.nest['a'][0] * 0.5 + x
s.nest['a'][1]['b'][1].append(s.k)
s.nest['a'][1]['b'] = (y.detach(), [s.k])
y = y + s.nest['a'][1]['b'][0] + len(s.nest['a'][1]['b'][1])
s.nest['c'] = s.nest['a'][-1]; s.nest['c']['d'] = x
s.nest = {**s.nest, 'a': list(s.nest['a'])}
s.nest = copy.copy(s.nest)
s.nest['a'][0].mul_(0.5); y = y + s.nest['a'][0]
heapq.heappush(s.hp, int(s.k) % 5); y = y + heapq.heappop(s.hp)
bisect.insort(s.hp, s.k); s.hp.reverse(); y = y + s.hp[0]
s.hp.sort(key=lambda each: -each); y = y * s.hp[-1]
s.hp *= 2; del s.hp[4:]
s.hp = sorted({*s.hp, 4}); y = y + sum(s.hp)
s.tup = (s.tup[0], {'n': s.tup[1]['n'] + 1}, (s.k, s.tup[2][1] * 0.5)); y = y + s.tup[2][1]
s.tup[0].append(x); s.tup[1]['n'] -= 1; y = y + len(s.tup[0]) * s.tup[1]['n']
y = y + sum(s.tup[0]) + s.tup[2][0]
s.gr = net.weight.grad
y = y + s.gr.sum() if s.gr is not None else y
net.weight.grad = None if net.weight.grad is not None else net.weight.detach() * 0.5
net.bias.grad.zero_() if net.bias.grad is not None else None
net(x).sum().backward()
(net(x).sum() + net2(y.detach()).sum()).backward(inputs=[net.weight])
loss = opt.step(closure); y = y + loss.detach()
opt.step(lambda: net(x).square().sum()); y = y + 1
s.a = s.a.detach().requires_grad_(not s.a.requires_grad)
s.a.requires_grad_(not s.a.requires_grad) if s.a.is_leaf else None
s.a = s.a.detach()
y = y + s.a.requires_grad + s.a.is_leaf
y = y + s.a.grad if s.a.grad is not None else y
(s.a * y.detach()).sum().backward() if s.a.requires_grad else None
s.a.grad = None
s.a = s.a.half().float()
y = y.to(s.a.dtype); y = y + s.a
s.i = s.i.float().mul(0.5).long()
y = y + (s.a.dtype == torch.float64)
x.add_(1); y = y + x
x[0] = s.k
x.mul_(s.b[0])
y = y + x.stride(0) + x.is_contiguous()
y = y + (x.dtype == torch.float64) + x.is_leaf
x.requires_grad_(False) if x.is_leaf else None
s.kept = x; y = y + s.kept
s.__dict__['z'] = s.k; y = y + vars(s)['z']
s.__dict__.update(f=s.f * 0.5)
y = y + globals()['G']
s.o = copy.copy(s.o); s.o.scale *= 0.5
s.o = copy.deepcopy(s.o); y = y + s.o.z
s.o, s.o.scale = Other(s.k), 1
y = y + functools.reduce(operator.add, (x for _ in range(int(s.k) % 3)), 0)
y = y + sum(v * s.f for v in range(len(s.t)))
y = y + (w := s.k) * 0.5; s.k = w + 1
y = y + (1 if s.flag and s.t else 2)
y = y + len([*zip(s.t, (s.a, s.b))])
y = y + max(s.k, s.f, key=abs)
y = y + math.floor(s.f * 10)
y = y + int(f'{int(s.k)}1')
y = y + any(each is s.a for each in (s.b, s.c, *s.t))
y = y + hash(('a', s.k)) % 7
s.k = -s.k
s.k = s.k % 3 if s.k > 2 else s.k
s.f += 0.25 * s.k
s.d.setdefault('z', s.a); y = y + s.d['z']
s.d |= {'u': x}
s.t[-1:] = [s.a]
s.t.extend(s.t[:1])
s.t = [*reversed(s.t)]
y = y + (s.t.pop() if s.t else 0)
y = y + torch.stack([*s.t, s.a]).sum(0)
with torch.no_grad(): s.a.copy_(s.a * 0.5 + y)
with torch.inference_mode(): s.k += torch.is_inference_mode_enabled()
with torch.enable_grad(): z = s.a.detach().requires_grad_(); y = y + torch.autograd.grad((z * y.detach()).sum(), z)[0]
torch.set_grad_enabled(True)
s.a = torch.where(s.a > 0.5, s.a, y.detach())
s.a = torch.cat([s.a[1:], y.detach()[:1]])
s.a = s.a.flip(0).contiguous()
s.a.clamp_(-2, 2).neg_()
s.a += y.detach()
s.a **= 2
s.a.sub_(s.a)
s.a.set_(s.b)
s.a, s.c = s.a.unbind(0)[0].expand(3), s.a
s.b.data.copy_(s.a)
s.b.data = s.a
s.c = s.c.detach() if s.c is not None else None
s.c = [s.a, (s.b, s.c is None)]
s.c = {'y': y, 'n': None}
s.c = None
del s.c; s.c = 1
S.count -= s.k
type(s).shared = getattr(type(s), 'shared', 0) + 1; y = y + S.shared
if s.k > 3: y = y * 2
while s.k > 4: s.k -= 2
for i in range(int(s.k) % 3): s.t.append(y.detach() * i)
for key in sorted(s.d): s.d[key] = s.d[key] * 0.5
assert s.k is not None
y, _ = (y + [each.inside for each in [watched.__enter__()]][0], watched.__exit__(None))
with contextlib.suppress(AttributeError): s.k += 1; y = y + s.nothing
with watched: s.f *= 0.5; raise ValueError
y = s.a
y = s.a.view(3)
y = s.vi if s.vi.shape == (3,) else y
s.c = last
y = y + last
y = y + given
s.last = y
given = x
last = y
last.mul_(0.5)
y = Doubled.apply(y, s.f)
z = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False); z.sum().backward(); y = y + z.detach()
y = torch.utils.checkpoint.checkpoint(lambda a: a * s.f + s.a, y, use_reentrant=False)
s.a.register_hook(lambda grad: grad * s.f) if s.a.requires_grad else None
with contextlib.suppress(KeyError): z = net(x); z.register_hook(raising); z.sum().backward()
with contextlib.suppress(KeyError): s.k += 1; handle = net.weight.register_hook(raising); net(x).sum().backward()
for each in [*(net.weight._backward_hooks or ())]: net.weight._backward_hooks.pop(each)
with contextlib.suppress(KeyError): nested_raises(y)
with contextlib.suppress(KeyError): s.a.add_(1); s.k += 1; raise KeyError
net.load_state_dict(net2.state_dict())
net2.load_state_dict({k: v * 0.5 + s.f for k, v in net.state_dict().items()})
torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(net.parameters()) * 0.5, net2.parameters())
for p, q in zip(net.parameters(), net2.parameters()): q.data.lerp_(p.data, 0.5)
with torch.no_grad(): torch._foreach_mul_([*net.parameters()], 0.5)
net.weight, net2.weight = net2.weight, net.weight
net.weight = torch.nn.Parameter(net.weight.detach() * 0.5)
y = y + torch.func.functional_call(net, {'weight': net2.weight, 'bias': net.bias}, x).detach()
y = y + torch.func.grad(lambda a: (a * s.a.detach() * a).sum())(y.detach())
y = y + torch.vmap(lambda a: a * s.f)(s.m2).sum(0)
total = 0 * y; total += s.k; y = total + y
z = torch.zeros(3); z += s.f; z[1] = s.k; y = y + z
z = torch.zeros_like(x); z.copy_(s.a); z[1:] = s.k; y = y + z
z = y.new_zeros(2, 3); z[0], z[1] = y.detach(), s.a.detach(); s.m2 = z
s.a.view(-1)[-1:].fill_(s.f)
s.a.data[0] = s.k
s.a.detach().add_(1); y = y + s.a
s.a.index_fill_(0, torch.tensor([0, 2]), s.f)
s.a[torch.tensor([True, False, True])] = s.k
s.a[[0, 1]] = s.a[[1, 0]].clone()
s.a.masked_fill_(s.a > 1, 0.5)
torch.mul(s.a, 0.5, out=s.a)
s.t = [each.clone() for each in s.t]; y = y + sum(s.t)
s.t = [s.a[:2], s.a[1:]]; s.t[0].add_(1); y = y + s.t[1].sum()
for each in s.t: each.mul_(0.5)
s.d['v'] = s.a.view(3); s.d['v'].add_(s.k); y = y + s.a
y = y + (s.a.storage_offset() if s.a.is_contiguous() else 3) + s.a.ndim + s.a.numel()
y = y + len(set(map(id, [s.a, s.b, *s.t]))) + sum(each is s.b for each in s.d.values())
y = y * (1.5 if x is given else 1)
y = y + 1 if x is x0 else y
""".strip().splitlines()

OUTSIDE = """
s.p.rate = 2.0
s.p = Plain(3)
s.slotted = Slotted()
s.slotted.value = make(0.5)
type(s).base_only = 2.0
Base.base_only = 5.0
os.environ['MONARCH_STATEFUL'] = os.environ.get('MONARCH_STATEFUL', '')[:3] + 'a'
s.on = Mode.B
sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
opt.param_groups[0]['lr'] = 1
half = functools.partial(half, by=2.0) if isinstance(half, functools.partial) else half
net.register_forward_hook(lambda module, args, out: out + 1)
s = copy.copy(s)
s.member = types.MethodType(lambda self, y: y * self.k, s)
pass
s.k = 5
s.k = 1.0
s.k = True
s.flag = not s.flag
s.a = make(3.0)
s.t = []
s.t.append(make(0.5))
s.t = list(s.t)
s.d = dict(s.d)
s.d['u'] = make(0.25)
s.b = s.a
s.t = [s.a, s.b]
G = 7
G = 1.0
GT = make(1.5)
s.o.scale = 0.75
s.o = Other(1)
s.c = None
S.count = 2
S.apply = lambda self, y: y - self.a
s.apply = lambda y: y + 2
helper = lambda y: y * 2
s.a.add_(1)
s.f = -0.0
net, opt = build()
net.eval()
net.weight = torch.nn.Parameter(place(torch.nn.Linear(3, 3)).weight.detach() * 0.5)
net.zero_grad()
opt.param_groups[0]['lr'] = 0.01
opt.param_groups[0]['momentum'] = 0.25
net.bias.requires_grad_(False)
keep = s.a
s.fail = True
s.fail = 1
s.fail = 2
s.fail = 3
s.x = 1
s.__dict__.pop('x', None)
s.missing = 3
registry.scale = 4.0
registry['a'] = 0.5
record = Record(2.0)
record.parts = [make(1.0)]
net, net2 = net2, net
net2, opt2 = build()
net2 = net
net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})
s.q.clear()
s.q = type(s.q)(s.q, 3)
s.e.add(7)
s.d.clear()
S.twice = property(lambda self: 7)
s.w = weakref.ref(s)
s.w = weakref.ref(s.o)
s.dd = collections.defaultdict(list)
s.dd.default_factory = lambda: [make(1.0)]
s.dd['u'] = []
s.ct.clear()
s.ct['b'] = 5
s.od.move_to_end(next(iter(s.od)))
s.od = collections.OrderedDict(reversed(list(s.od.items())))
s.pt = Point(make(1.0), 2)
s.it = itertools.cycle([3.0])
s.gen = counting(5)
CV.set(7)
s.fl = Flags.A | Flags.B
s.fs = [lambda y: y * 2]
s.fs.reverse()
s.lazy = Lazy(); s.lazy.size = 2
s.lazy.made = 5
Lazy.__getattr__ = lambda self, name: 3
Lazy.shared = [make(0.5)]
s.ns.v = 2.0
s.ch.maps[1]['a'] = 7
s.ch = s.ch.new_child({'a': 1})
s.ar[0] = 2.0
s.by[0] = 7
by_default.__defaults__[0].clear()
caught = lambda y: y
deep.norm.eval()
deep.train()
deep.one = place(torch.nn.Linear(3, 3))
deep.two = torch.nn.Sequential(deep.two[0])
deep.two.append(torch.nn.ReLU())
deep.seen = make(1.0)
deep.scale = 2
hook = deep.one.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
hook.remove()
dopt.param_groups[0]['lr'] = 0.1
dopt.param_groups[0]['weight_decay'] = 0.1
dopt.param_groups[1]['betas'] = (0.5, 0.9)
len(dopt.param_groups) < 3 and dopt.add_param_group({'params': deep.norm.parameters(), 'lr': 0.5})
dopt = torch.optim.SGD(deep.parameters(), lr=0.1)
deep.one.requires_grad_(False)
deep.one.weight.requires_grad_(not deep.one.weight.requires_grad)
s.i = make(1.0).long()
s.a = make(1.0).double()
s.a[1] = 0.5
s.b = s.a[:2]
torch.nn.init.constant_(net.weight, 0.5)
opt.state.clear()
s.od.pop('b', None)
half = lambda y: y
half.by = 3
nested(make(1.0))
s.left = nested(make(0.5))
nested = within_nested
within_nested = lambda y: y * 3
s.box = {}
s.box['a'] = [make(0.25)]
trainer = Trainer()
trainer2 = trainer
trainer.fit(make(0.5))
trainer.steps = 5
trainer.model.bias.requires_grad_(not trainer.model.bias.requires_grad)
trainer.opt = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
trainer.history.clear()
Trainer.predict = lambda self, y: y * self.steps
s.loops = loopers()
s.loops.pop()
s.loops[0](make(1.0))
watched = Watched(3)
watched.value = 1
sum(watched)
s.dies = Dies()
Dies.count = 5
net.weight.register_hook(tapped)
net.bias.register_hook(lambda grad: grad * 2)
net.weight.register_post_accumulate_grad_hook(lambda p: s.taps.append(p.grad.sum()))
net.register_full_backward_hook(lambda m, gi, go: tuple(None if g is None else g * 0.5 for g in gi))
net.register_forward_hook(lambda m, a, o: s.t.append(o.detach()))
opt.register_step_post_hook(lambda o, a, k: s.__dict__.__setitem__('k', s.k + 1))
s.fail = 'hook'
s.fail = 'step'
s.fail = 'nested'
s.fail = 'closure'
s.taps = []
s.m2 = s.m2.t().contiguous().t()
s.m2 = make(0.5).repeat(2, 1)
s.m2[0] = 3.0
s.vi = s.a[:1]
s.vi = s.b
s.vi.zero_()
s.a = s.m2[0] if hasattr(s, 'm2') else s.a
s.pl = torch.zeros(3)
s.pl.add_(1)
s.pl = make(1.0)
s.nest['a'][1]['b'] = (make(2.0), [])
s.nest['a'].insert(1, {'b': (make(0.5), [2, 3])})
s.nest['c'] = s.nest['a'][-1]
s.nest = copy.deepcopy(s.nest)
s.hp = [5, 1]
s.hp.clear()
s.tup[0].clear()
s.tup = ([], {'n': 0}, (2, make(1.0)))
s.gr = make(1.0)
net.weight.grad = make(1.0).repeat(3, 1)
net.bias.grad = None
net(x0).sum().backward()
opt.step()
opt.step(closure)
opt = torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True)
opt = torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5)
opt.param_groups[0]['momentum'] = 0.75
opt.load_state_dict(opt.state_dict())
net = net.double().float()
net.weight.data = net.weight.data * 0.5
net.weight.data.mul_(0.5)
net.requires_grad_(False)
net.requires_grad_(True)
s.a.requires_grad_() if s.a.is_floating_point() and s.a.is_leaf else None
s.a = s.a.detach()
s.a = s.a.detach().requires_grad_()
s.a.grad = make(1.0) if s.a.dtype is torch.float32 else None
s.a = s.a.half()
s.a.data = make(2.0)
s.a = s.a.view(3)
s.a = s.a[0].expand(3)
s.b = s.a.detach()
s.a, s.b = s.b, s.a
s.a = s.step_out = step(make(0.5))
step(make(0.25))
step(x0)
s.c = step(s.a.detach().clone())
x0.add_(0.5)
s.d = {'a': s.a, 'u': s.a}
s.t = [make(0.5)] * 2
s.t = (s.a,)
s.t.append(s.t[0]) if s.t and isinstance(s.t, list) else None
s.o = copy.copy(s.o)
s.o.z = s.a
s.o.z.mul_(2)
s.__class__ = type('S', (S,), {})
S.helped = 1
s.k = 10**6
s.k = 0
s.k = -1
s.k = 2.5
s.f = float('inf')
s.f = 3
s.f = make(0.5).sum()
s.flag = 0
s.flag = []
s.nothing = 2
G = make(2.0)
torch.set_default_dtype(torch.float32)
GT.zero_()
GT = s.a
helper = functools.partial(helper)
Base.member = lambda self, y: y * 2
S.o = Other(3)
del s.o; s.o = Other(2)
last.add_(1)
last = last.detach() * 2
given.add_(1) if not given.requires_grad else None
s.a = given
s.a = last
s.c = last
s.b = last.detach()
last = s.a
given = make(2.0)
s.last = make(0.5)
nested_raises(make(0.5))
net.weight._backward_hooks = None
net(x0).sum().backward(); opt.step(); opt.zero_grad()
s.a.detach().mul_(0.5)
s.a.data = s.b.detach().clone() if s.a.shape == s.b.shape and s.a.dtype is s.b.dtype else s.a.data
s.a.data[1:] = 0.25
s.t = [s.a[:2], s.a[1:]]
s.t = [s.a, s.a.view(3)]
s.d['v'] = s.b[:]
net.weight, net2.weight = net2.weight, net.weight
net2.weight = net.weight
net2.bias = None
net.bias = None
del net.bias; net.register_parameter('bias', None)
net.to(torch.float64).to(torch.float32)
""".strip().splitlines()
