// Looks at many objects of Python in one call, for `native.py`, which says what is asked of them and writes the table.
//
// It needs no header of Python's: these are functions of the stable ABI, which 3.11 and every later version exports, and
// an object begins with its count of references and its type (free-threaded builds, where it does not, are not served).

using Size = long long;

extern "C" {
struct Object {
  Size references;
  Object* type;
};
extern Object _Py_NoneStruct, PyDict_Type, PyList_Type, PyTuple_Type, PyUnicode_Type;
void Py_IncRef(Object*);
void Py_DecRef(Object*);
Object* PyObject_GetAttr(Object*, Object*);
Object* PyObject_GenericGetDict(Object*, void*);
Object* PyObject_CallFunctionObjArgs(Object*, ...);
int PyObject_IsTrue(Object*);
Size PyDict_Size(Object*);
int PyDict_Next(Object*, Size*, Object**, Object**);
Object* PyDict_GetItemWithError(Object*, Object*);
Size PyList_Size(Object*);
Object* PyList_GetItem(Object*, Size);
Object* PyTuple_New(Size);
Size PyTuple_Size(Object*);
Object* PyTuple_GetItem(Object*, Size);
int PyTuple_SetItem(Object*, Size, Object*);
void* PyType_GetSlot(Object*, int);
int PyUnicode_Compare(Object*, Object*);
Object* PyErr_Occurred();
}

namespace {

struct Property {  // of a type that C has written
  const char* name;
  Object* (*get)(Object*, void*);
  void* set;
  const char* doc;
  void* closure;
};
constexpr int properties = 73;  // as PyType_GetSlot calls them

enum How : Size { same = 1, plain = 2, typed = 4, empty = 8, kept = 16, text = 32, direct = 64 };
enum Inside : Size { attributes = 1, entries = 2, items = 3 };

struct Place {
  Object* key;
  Size how;
  Object* expected;  // the object or its type: an address, which the table keeps alive for plain values alone
};

struct Node {
  Size from;  // the number of the kept value that it looks into, or ~ the number of one that is given
  Object* type;
  Size asks;  // whether its class has a say in what its `__dict__` is
  Size asked;  // so many places are read as attributes; the others are inside
  Size inside;
  Size length;
  Size count;
};

struct Table {
  Size nodes, keeps;
  Object* dict_name;  // "__dict__"
  Object* same_plain;  // whether two plain values are the same to a program
};

bool is_equal(const Table& table, const Place& place, Object* value) {
  if (value->type != place.expected->type) return false;
  Py_IncRef(value);
  Object* found = PyObject_CallFunctionObjArgs(table.same_plain, place.expected, value, nullptr);
  Py_DecRef(value);
  if (found == nullptr) return false;
  const bool is_same = PyObject_IsTrue(found) == 1;
  Py_DecRef(found);
  return is_same;
}

// Whether a place has what is expected; a value that is kept goes into `values`, which owns it.
inline bool holds(const Table& table, const Place& place, Object* value, Object* values, Size& number) {
  if ((place.how & same) && value != place.expected) {
    if (!(place.how & plain) || !is_equal(table, place, value)) return false;
  }
  if ((place.how & typed) && value->type != place.expected) return false;
  if ((place.how & empty) && PyObject_IsTrue(value) != 0) return false;
  if (place.how & kept) {
    Py_IncRef(value);
    PyTuple_SetItem(values, number++, value);
  }
  return true;
}

bool inside_holds(const Table& table, const Node& node, const Place* place, Object* holder, Object* values, Size& number) {
  switch (node.inside) {
    case attributes: {  // by name, in any order
      if (holder->type != &PyDict_Type || PyDict_Size(holder) != node.length) return false;
      for (Size at = 0; at < node.count; ++at, ++place) {
        Object* value = PyDict_GetItemWithError(holder, place->key);
        if (value == nullptr || !holds(table, *place, value, values, number)) return false;
      }
      return true;
    }
    case entries: {  // all of them, in order; keys are the same objects, or equal text
      if (PyDict_Size(holder) != node.length) return false;
      Object *key, *value;
      for (Size at = 0, cursor = 0; at < node.count; ++at, ++place) {
        if (!PyDict_Next(holder, &cursor, &key, &value)) return false;
        if (key != place->key) {
          if (!(place->how & text) || key->type != &PyUnicode_Type) return false;
          if (PyUnicode_Compare(key, place->key) != 0) return false;
        }
        if (!holds(table, *place, value, values, number)) return false;
      }
      return true;
    }
    case items: {
      const bool is_list = holder->type == &PyList_Type;
      if ((is_list ? PyList_Size(holder) : PyTuple_Size(holder)) != node.length) return false;
      for (Size at = 0; at < node.count; ++at, ++place) {
        Object* value = is_list ? PyList_GetItem(holder, at) : PyTuple_GetItem(holder, at);
        if (value == nullptr || !holds(table, *place, value, values, number)) return false;
      }
      return true;
    }
  }
  return true;
}

bool node_holds(const Table& table, const Node& node, const Place* place, Object* holder, Object* values, Size& number) {
  if (holder->type != node.type) return false;
  for (Size at = 0; at < node.asked; ++at, ++place) {
    const Property* property = reinterpret_cast<const Property*>(place->key);
    Object* value = place->how & direct ? property->get(holder, property->closure) : PyObject_GetAttr(holder, place->key);
    if (value == nullptr) return false;
    const bool good = holds(table, *place, value, values, number);
    Py_DecRef(value);
    if (!good) return false;
  }
  if (node.inside != attributes) return inside_holds(table, node, place, holder, values, number);
  Object* own = node.asks ? PyObject_GetAttr(holder, table.dict_name) : PyObject_GenericGetDict(holder, nullptr);
  if (own == nullptr) return false;
  const bool good = inside_holds(table, node, place, own, values, number);
  Py_DecRef(own);
  return good;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// A property that a type has itself, not from its bases; null where it has none of this name.
EXPORTED const Property* find(Object* type, const char* name) {
  const Property* found = static_cast<const Property*>(PyType_GetSlot(type, properties));
  while (found != nullptr && found->name != nullptr && __builtin_strcmp(found->name, name) != 0) ++found;
  return found != nullptr && found->name != nullptr && found->get != nullptr ? found : nullptr;
}

// A tuple of the values that are kept; None where a place has another value. Raises what reading raises.
EXPORTED Object* look(const Table* table, Object* given) {
  Object* values = PyTuple_New(table->keeps);
  if (values == nullptr) return nullptr;
  Size number = 0;
  const Node* node = reinterpret_cast<const Node*>(table + 1);
  for (Size at = 0; at < table->nodes; ++at) {
    const Place* places = reinterpret_cast<const Place*>(node + 1);
    Object* holder = node->from >= 0 ? PyTuple_GetItem(values, node->from) : PyTuple_GetItem(given, ~node->from);
    if (holder == nullptr || !node_holds(*table, *node, places, holder, values, number)) {
      Py_DecRef(values);
      if (PyErr_Occurred() != nullptr) return nullptr;
      Py_IncRef(&_Py_NoneStruct);
      return &_Py_NoneStruct;
    }
    node = reinterpret_cast<const Node*>(places + node->asked + node->count);
  }
  return values;
}
